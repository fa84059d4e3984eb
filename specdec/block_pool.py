"""BlockPool: who holds which block of the KV cache, and which blocks can be shared."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reserves, shares and releases blocks; a block is held by as many requests as share it.

    A full block whose tokens are committed is *published* under a keyed hash of its tokens, all
    tokens before it and the tenant's salt. Released published blocks stay findable as prefix hits
    until their space is needed, oldest first.

    Each block is in exactly one place: held (refs > 0), `_free_plain`, or `_free_cached`.

    Example:
        pool = BlockPool(num_blocks=8, block_size=32)
        blocks = pool.reserve(2)        # None when fewer than 2 are free
        pool.release(blocks)
        pool.check([])                  # proves free + held = total
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._key = secrets.token_bytes(32)  # a guessable hash would let tenants forge hits
        self._refs = [0] * num_blocks
        self._free_plain = dict.fromkeys(range(num_blocks))
        self._free_cached: dict[int, None] = {}  # oldest first
        self._digest_of: dict[int, bytes] = {}
        self._block_with: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be reserved now."""
        return len(self._free_plain) + len(self._free_cached)

    def reserve(self, count: int, *, after: int | None = None) -> list[int] | None:
        """Take `count` blocks, or None if there are too few.

        Blocks that follow `after` are preferred: attention reads a run of neighbouring blocks
        without gathering them.
        """
        if count > self.num_free:
            return None
        taken: list[int] = []
        for _ in range(count):
            block = self._next_free(after)
            self._refs[block] = 1
            taken.append(block)
            after = block
        return taken

    def _next_free(self, after: int | None) -> int:
        if after is not None and after + 1 in self._free_plain:
            block = after + 1
            del self._free_plain[block]
        elif self._free_plain:
            block = next(iter(self._free_plain))
            del self._free_plain[block]
        else:
            block = next(iter(self._free_cached))
            del self._free_cached[block]
            self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block, None)
        if digest is not None and self._block_with.get(digest) == block:
            del self._block_with[digest]

    def release(self, block_ids: Iterable[int]) -> None:
        """Return one hold on each block; later blocks of a prefix become evictable first."""
        for block in reversed(list(block_ids)):
            assert self._refs[block] > 0, f"block {block} released twice"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            digest = self._digest_of.get(block)
            if digest is not None and self._block_with.get(digest) == block:
                self._free_cached[block] = None
            else:
                self._forget(block)
                self._free_plain[block] = None

    def share_prefix(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Hold and return the longest run of published blocks that begins `token_ids`.

        At least one token is left over: the root must be computed to yield logits.
        """
        shared: list[int] = []
        digest = self._root_digest(salt)
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            digest = self._digest(digest, token_ids[start : start + self.block_size])
            block = self._block_with.get(digest)
            if block is None:
                break
            if self._refs[block] == 0:
                del self._free_cached[block]
            self._refs[block] += 1
            shared.append(block)
        return shared

    def publish(
        self, block_ids: Sequence[int], token_ids: Sequence[int], salt: str, first: int
    ) -> None:
        """Make the full blocks from index `first` on findable; all of `token_ids` is committed."""
        if not self._prefix_cache:
            return
        digest = self._digest_of[block_ids[first - 1]] if first else self._root_digest(salt)
        for index in range(first, len(token_ids) // self.block_size):
            start = index * self.block_size
            digest = self._digest(digest, token_ids[start : start + self.block_size])
            self._digest_of[block_ids[index]] = digest
            self._block_with.setdefault(digest, block_ids[index])

    def is_shared(self, block: int) -> bool:
        """Whether several requests hold the block, so that none may write it."""
        return self._refs[block] > 1

    def forget(self, block_ids: Iterable[int]) -> None:
        """Withdraw published blocks whose content cannot be trusted."""
        for block in block_ids:
            self._forget(block)

    def _root_digest(self, salt: str) -> bytes:
        return hashlib.blake2b(salt.encode(), key=self._key, digest_size=16).digest()

    def _digest(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        data = parent + b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
        return hashlib.blake2b(data, key=self._key, digest_size=16).digest()

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Prove conservation: the holders' block tables account for every block.

        Raises AssertionError: a mismatch is our own bug.
        """
        holds = Counter(block for table in held for block in table)
        for block, refs in enumerate(self._refs):
            assert holds[block] == refs, f"block {block}: {refs} refs, {holds[block]} holders"
            places = (refs > 0) + (block in self._free_plain) + (block in self._free_cached)
            assert places == 1, f"block {block} is in {places} places"
        num_held = sum(refs > 0 for refs in self._refs)
        assert self.num_free + num_held == self.num_blocks
        for digest, block in self._block_with.items():
            assert self._digest_of.get(block) == digest, f"block {block}: stale digest"
        assert not self._digest_of.keys() & self._free_plain.keys(), "free block still published"
