"""BlockPool: conservation under any sequence of calls, and what prefix sharing may return."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.block_pool import BlockPool

SIZE, NUM_BLOCKS = 2, 7
salts = st.sampled_from(["", "tenant"])
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=4 * SIZE)


class Holder:
    """A request as the pool sees it."""

    def __init__(self, token_ids: list[int], salt: str, blocks: list[int], shared: int) -> None:
        self.token_ids, self.salt, self.blocks = token_ids, salt, blocks
        self.num_published = shared


class PoolMachine(RuleBasedStateMachine):
    """Requests come, share, publish, roll back and go; a model knows what each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.holders: list[Holder] = []
        # What a holder computed into each block; taken away when the block is handed out anew.
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(token_ids=token_lists, salt=salts)
    def arrive(self, token_ids: list[int], salt: str) -> None:
        shared = self.pool.share_prefix(token_ids, salt)
        assert len(shared) * SIZE < len(token_ids)
        for index, block in enumerate(shared):  # never other tokens, never another salt
            assert self.content[block] == (salt, tuple(token_ids[: (index + 1) * SIZE]))
        missing = -(-len(token_ids) // SIZE) - len(shared)
        fresh = self.reserve(missing, shared[-1] if shared else None)
        if fresh is None:
            self.pool.release(shared)
            return
        self.holders.append(Holder(token_ids, salt, shared + fresh, len(shared)))

    def reserve(self, count: int, after: int | None) -> list[int] | None:
        num_free, held = self.pool.num_free, {b for h in self.holders for b in h.blocks}
        blocks = self.pool.reserve(count, after=after)
        assert (blocks is None) == (count > num_free)
        for block in blocks or ():
            assert block not in held
            self.content.pop(block, None)
        assert self.pool.num_free == num_free - len(blocks or ())
        return blocks

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        full = len(holder.token_ids) // SIZE
        for index in range(holder.num_published, full):
            tokens = tuple(holder.token_ids[: (index + 1) * SIZE])
            self.content[holder.blocks[index]] = (holder.salt, tokens)
        self.pool.publish(holder.blocks, holder.token_ids, holder.salt, holder.num_published)
        holder.num_published = max(full, holder.num_published)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def grow(self, data: st.DataObject, token_id: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if len(holder.token_ids) == len(holder.blocks) * SIZE:
            blocks = self.reserve(1, holder.blocks[-1])
            if blocks is None:
                return
            holder.blocks += blocks
        holder.token_ids = [*holder.token_ids, token_id]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.release(holder.blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """As after NaN logits: nobody may find what only this holder held."""
        holder = data.draw(st.sampled_from(self.holders))
        own = [b for b in holder.blocks if not self.pool.is_shared(b)]
        self.pool.forget(own)
        self.holders.remove(holder)
        self.pool.release(holder.blocks)
        for block in own:
            self.content.pop(block, None)

    @invariant()
    def conserved(self) -> None:
        self.pool.check([holder.blocks for holder in self.holders])
        for block in range(NUM_BLOCKS):
            holds = sum(block in holder.blocks for holder in self.holders)
            assert self.pool.is_shared(block) == (holds > 1)


def test_any_sequence_of_calls() -> None:
    PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
    PoolMachine.TestCase("runTest").debug()


def published(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    """A request that came, published and went."""
    blocks = pool.reserve(len(token_ids) // pool.block_size)
    assert blocks is not None
    pool.publish(blocks, token_ids, salt, 0)
    pool.release(blocks)
    return blocks


def test_a_released_prefix_is_found_up_to_the_root() -> None:
    pool = BlockPool(8, 2)
    blocks = published(pool, [1, 2, 3, 4])
    for token_ids, found in [
        ([1, 2, 3, 4, 5], blocks),
        ([1, 2, 3, 4], blocks[:1]),  # one token must be left to compute
        ([1, 2, 9, 4, 5], blocks[:1]),
        ([1, 2], []),
        ([3, 4, 5], []),
        ([9, 2, 3, 4, 5], []),  # the same later tokens after another beginning
    ]:
        shared = pool.share_prefix(token_ids, "")
        assert shared == found
        pool.release(shared)
    assert pool.share_prefix([1, 2, 3, 4, 5], "tenant") == []
    pool.check([])


def test_two_holders_share_a_block_and_the_last_frees_it() -> None:
    pool = BlockPool(4, 2)
    published(pool, [1, 2])
    first, second = (pool.share_prefix([1, 2, 3], "") for _ in range(2))
    assert first == second and pool.is_shared(first[0]) and pool.num_free == 3
    pool.check([first, second])
    pool.release(first)
    assert not pool.is_shared(second[0]) and pool.num_free == 3
    pool.release(second)
    assert pool.num_free == 4
    pool.check([])


def test_eviction_takes_the_oldest_and_within_a_prefix_the_last() -> None:
    pool = BlockPool(4, 2)
    old, new = published(pool, [1, 2, 3, 4]), published(pool, [5, 6, 7, 8])
    assert pool.num_free == 4
    assert pool.reserve(3) == [old[1], old[0], new[1]]
    # The beginning of the newer prefix has outlived its end, and can still be used.
    assert pool.share_prefix([5, 6, 7, 8, 9], "") == new[:1]


def test_plain_blocks_go_before_findable_ones() -> None:
    pool = BlockPool(4, 2)
    kept = published(pool, [1, 2])
    blocks = pool.reserve(3)
    assert blocks is not None and kept[0] not in blocks
    assert pool.share_prefix([1, 2, 3], "") == kept


def test_use_refreshes_a_prefix() -> None:
    pool = BlockPool(2, 2)
    first, second = published(pool, [1, 2]), published(pool, [3, 4])
    pool.release(pool.share_prefix([1, 2, 9], ""))
    assert pool.reserve(1) == second
    assert pool.share_prefix([1, 2, 9], "") == first


def test_reserve_prefers_neighbours() -> None:
    pool = BlockPool(10, 2)
    first = pool.reserve(2)
    other = pool.reserve(1)
    assert (first, other) == ([0, 1], [2])
    assert pool.reserve(3, after=5) == [6, 7, 8]
    assert pool.reserve(1, after=1) == [3]  # the neighbour is taken
    assert pool.reserve(1, after=9) == [4]  # there is none
    assert pool.reserve(0) == []
    assert pool.reserve(3) is None
    assert pool.num_free == 2  # nothing was taken


def test_publishing_the_same_text_twice_keeps_one_copy() -> None:
    pool = BlockPool(4, 2)
    a, b = pool.reserve(1), pool.reserve(1)
    assert a is not None and b is not None
    pool.publish(a, [1, 2], "", 0)
    pool.publish(b, [1, 2], "", 0)
    pool.release(b)
    pool.check([a])
    pool.release(a)
    assert pool.share_prefix([1, 2, 3], "") == a
    pool.check([a])


def test_without_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(4, 2, prefix_cache=False)
    published(pool, [1, 2, 3, 4])
    assert pool.share_prefix([1, 2, 3, 4, 5], "") == []


def test_hashes_are_keyed_per_pool() -> None:
    """With a guessable hash a tenant could build a text that hits another's block."""
    pools = [BlockPool(1, 2) for _ in range(2)]
    for pool in pools:
        published(pool, [1, 2])
    digests = [next(iter(pool._block_with)) for pool in pools]
    assert digests[0] != digests[1]


def test_double_release_is_refused() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.reserve(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_check_catches_broken_books() -> None:
    def pool_and_table() -> tuple[BlockPool, list[int]]:
        pool = BlockPool(4, 2)
        blocks = pool.reserve(2)
        assert blocks is not None
        pool.publish(blocks, [1, 2, 3, 4], "", 0)
        pool.check([blocks])
        return pool, blocks

    pool, blocks = pool_and_table()
    for held in ([], [blocks, blocks], [blocks[:1]], [[*blocks, 3]]):  # leaked or stolen
        with pytest.raises(AssertionError, match="refs"):
            pool.check(held)
    pool, blocks = pool_and_table()
    pool._digest_of[blocks[0]] = b"another"
    with pytest.raises(AssertionError, match="stale digest"):
        pool.check([blocks])
    pool, blocks = pool_and_table()
    pool._free_plain[blocks[1]] = None
    with pytest.raises(AssertionError, match="in 2 places"):
        pool.check([blocks])
    pool, blocks = pool_and_table()
    del pool._free_plain[3]
    with pytest.raises(AssertionError, match="in 0 places"):
        pool.check([blocks])
    pool, blocks = pool_and_table()
    pool._digest_of[3] = b"leftover"
    with pytest.raises(AssertionError, match="still published"):
        pool.check([blocks])
