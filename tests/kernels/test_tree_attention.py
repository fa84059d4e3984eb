"""Tree attention's Triton kernels: the reference's results, no key too many, the promised bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.attention_tiles import make_tiles
from tests.kernels.device import DEVICE, DTYPES, check_error
from tests.kernels.paged import Paged, Rows, lay, random_parents, random_rows

BLOCK = 16
BOTH_MODES = pytest.mark.parametrize("is_deterministic", [False, True])


def tree(num_nodes: int, reach: int = 20) -> tuple[int, ...]:
    return random_parents(num_nodes, reach, seed=num_nodes)


def check(paged: Paged, got: Tensor) -> None:
    """Against the reference on the same numbers; rows of no segment are exact zeros."""
    plain = got if got.dtype == torch.float32 else paged.dense()
    num_rows = sum(segment.num_rows for segment in paged.segments)
    check_error(got[:num_rows], plain[:num_rows], paged.want()[:num_rows])
    assert not got[num_rows:].any()


# --- the reference's results ---


@dataclass(frozen=True)
class Case:
    """Requests as (root, length of the chain or parents of the tree), and how they are laid."""

    requests: tuple[tuple[int, int | tuple[int, ...]], ...]
    block_size: int = BLOCK
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 16
    window: int | None = None
    num_padding: int = 0

    def paged(self, seed: int = 0) -> Paged:
        sizes = {
            "num_kv_heads": self.num_kv_heads, "group": self.group, "head_dim": self.head_dim,
        }  # fmt: skip
        parts = [
            random_rows(root, rows, **sizes, seed=seed + index)
            for index, (root, rows) in enumerate(self.requests)
        ]
        return lay(
            parts,
            block_size=self.block_size,
            window=self.window,
            num_padding=self.num_padding,
            seed=seed,
        )


MIX: tuple[tuple[int, int | tuple[int, ...]], ...] = (
    (40, tree(6)), (0, 21), (130, 1), (64, tree(9, 2)), (15, 17), (33, 5), (0, tree(3)), (63, 1),
)  # fmt: skip
CASES = {
    "one row": Case(((0, 1),)),
    "second row": Case(((1, 1),), num_kv_heads=3),
    "a root alone": Case(((1, (-1,)),)),
    "less than a block": Case(((BLOCK - 1, 1), (BLOCK - 1, tree(3))), group=3),
    "a block": Case(((BLOCK, 1), (BLOCK, tree(3))), group=3),
    "more than a block": Case(((BLOCK + 1, 1), (BLOCK + 1, tree(3))), group=3, num_kv_heads=2),
    "63 nodes": Case(((0, tree(63)),)),
    "64 nodes": Case(((17, tree(64)),)),
    "65 nodes": Case(((31, tree(65)),), block_size=32),
    "chain with words": Case(((3, tuple(range(-1, 64))),), block_size=48),
    "group of 8": Case(((47, tree(5)), (48, 3)), block_size=48, group=8, num_kv_heads=2),
    "group of 3": Case(((130, tree(23)),), group=3, head_dim=32, num_padding=3),
    "group of 4": Case(((129, 9), (49, tree(17))), group=4, num_kv_heads=2, num_padding=2),
    "long chunk": Case(((37, 300),), group=3),
    "long chunk, window": Case(((150, 257),), window=70, block_size=48),
    "mix": Case(MIX, num_padding=5),
    "mix, window 1": Case(MIX, window=1, num_padding=1),
    "mix, window 16": Case(MIX, window=16),
    "window 3 in a deep tree": Case(((63, tree(19, 2)),), window=3),
    "window 50": Case(((300, tree(21, 3)), (200, 30), (48, tree(6))), window=50, group=2),
    "window 64": Case(((127, tree(9, 1)), (128, 3), (700, 1)), window=64),
    "some hundreds": Case(((448, tree(7)), (600, 20), (511, tree(4, 1))), block_size=32),
    "past a split": Case(((1025, tree(5)), (1024, 1), (2, 3)), block_size=48, num_padding=2),
}


@BOTH_MODES
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, is_deterministic: bool) -> None:
    """Also in three parts, with fewer rows and keys at a time."""
    paged = CASES[name].paged(seed=len(name))
    check(paged, paged.run(paged.shape(is_deterministic)))
    if not is_deterministic and "long" not in name:
        check(paged, paged.run(paged.shape(False, num_splits=3, block_m=16, block_n=32)))


@pytest.mark.parametrize(
    ("num_nodes", "is_deterministic"), [(255, False), (256, False), (256, True)]
)
def test_four_words(num_nodes: int, is_deterministic: bool) -> None:
    paged = Case(((BLOCK + 1, tree(num_nodes, 256)),)).paged()
    shape = paged.shape(is_deterministic)
    assert shape.words == 4
    check(paged, paged.run(shape))


@BOTH_MODES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (80, 1), (96, 4), (128, 8), (256, 2)])
def test_head_sizes(head_dim: int, group: int, dtype: torch.dtype, is_deterministic: bool) -> None:
    requests = ((70, tree(5)), (40, 3))
    if head_dim == 256 and not is_deterministic:
        requests = ((70, tree(70)), (40, 3))  # more nodes than keys at a time
    paged = Case(requests, head_dim=head_dim, group=group, num_padding=1).paged().to(dtype)
    got = paged.run(paged.shape(is_deterministic))
    assert got.dtype == dtype
    check(paged, got)
    if not is_deterministic:
        check(paged, paged.run(paged.shape(False, num_splits=2)))


@BOTH_MODES
@pytest.mark.parametrize("signs", [(1, 1), (-1, -1), (1, -1)])
def test_large_scores(signs: tuple[int, int], is_deterministic: bool) -> None:
    """Scores about 100 or -100, whose exponentials alone are infinite or zero in fp32."""
    rows = random_rows(700, tree(9), num_kv_heads=2)
    rows.q[..., 0], rows.k[:300, :, 0], rows.k[300:, :, 0] = 16, 25 * signs[0], 25 * signs[1]
    paged = lay([rows])
    check(paged, paged.run(paged.shape(is_deterministic, num_processors=16)))


requests = st.tuples(
    st.integers(0, 140) | st.sampled_from([63, 64, 255, 511, 513]),
    st.integers(1, 40) | st.builds(tree, st.integers(1, 12), st.sampled_from([1, 3, 12])),
)
cases = st.builds(
    Case,
    requests=st.lists(requests, min_size=1, max_size=4).map(tuple),
    block_size=st.sampled_from([16, 32, 48]),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 4, 8]),
    window=st.sampled_from([None, None, 1, 7, 64, 65, 200]),
    num_padding=st.sampled_from([0, 3]),
)


@settings(max_examples=8, deadline=None)
@given(case=cases, num_splits=st.integers(0, 5), seed=st.integers(0, 999))
def test_any_mix(case: Case, num_splits: int, seed: int) -> None:
    """`num_splits` 0 is the deterministic mode."""
    paged = case.paged(seed)
    changes = {"num_splits": num_splits} if num_splits else {}
    check(paged, paged.run(paged.shape(num_splits == 0, **changes)))


# --- what is read ---


@BOTH_MODES
@pytest.mark.parametrize("window", [None, 20])
def test_tables_beyond_a_request_are_not_used(window: int | None, is_deterministic: bool) -> None:
    paged = Case(MIX[2:5], window=window, num_padding=3).paged()
    used = {block for segment in paged.segments for block in segment.block_ids}
    shape = paged.shape(is_deterministic)
    garbage = max(set(range(len(paged.k_cache))) - used)
    assert paged.k_cache[garbage].isnan().all()
    assert torch.equal(paged.run(shape, garbage=garbage), paged.run(shape))


@BOTH_MODES
def test_padded_tables(is_deterministic: bool) -> None:
    """Tiles of a segment without rows and tails of row -1 write nothing."""
    paged = Case(((70, tree(6)), (3, 4)), group=2).paged()
    shape = paged.shape(is_deterministic)
    tiles = make_tiles(paged.segments, shape, num_rows=len(paged.q), device=DEVICE)

    def longer(table: Tensor, values: list[int]) -> Tensor:
        return torch.cat((table, table.new_tensor(values)))

    changes: dict[str, Any] = {
        name: longer(getattr(tiles, name), [0])
        for name in ("first_rows", "num_rows", "roots", "shared_lens", "num_own")
    }
    changes["block_tables"] = torch.nn.functional.pad(tiles.block_tables, (0, 2, 0, 1))
    changes["tile_segments"] = longer(tiles.tile_segments, [2, 2])
    changes["tile_rows"] = longer(tiles.tile_rows, [0, 0])
    if is_deterministic:
        changes["tail_rows"] = longer(tiles.tail_rows, [-1, -1])
        changes["tail_segments"] = longer(tiles.tail_segments, [0, 2])
    want = paged.run(shape)
    assert torch.equal(paged.run_tiles(replace(tiles, **changes)), want)


@BOTH_MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_8_bit_cache(dtype: torch.dtype, is_deterministic: bool) -> None:
    paged = Case(MIX[:2], num_kv_heads=2, group=3, head_dim=80, num_padding=2).paged()
    scales = torch.tensor([0.5, 0.03]), torch.tensor([0.01, 0.7])
    caches = [
        (cache / scale[:, None, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        for cache, scale in zip((paged.k_cache, paged.v_cache), scales, strict=True)
    ]
    k, v = (
        cache.float() * scale[:, None, None] for cache, scale in zip(caches, scales, strict=True)
    )
    paged = replace(paged, q=paged.q.to(dtype))
    stored = replace(paged, k_cache=caches[0], v_cache=caches[1])
    exact = replace(paged, k_cache=k, v_cache=v)
    check(exact, stored.run(paged.shape(is_deterministic), scales=scales))
    if not is_deterministic:
        check(exact, stored.run(paged.shape(False, num_splits=2), scales=scales))


def test_a_huge_cache() -> None:
    """Its last blocks lie where a 32-bit address would meet other memory of the same tensor."""
    part = random_rows(20, tree(5), head_dim=64)
    paged = lay([part], seed=1)
    small = [cache.nan_to_num().to(torch.float8_e4m3fn) for cache in (paged.k_cache, paged.v_cache)]
    scales = torch.ones(1), torch.ones(1)
    shape = paged.shape(True)
    want = replace(paged, k_cache=small[0], v_cache=small[1]).run(shape, scales=scales)
    num_blocks = 2**32 // small[0][0].numel() + 100
    (segment,) = paged.segments
    first = num_blocks - len(small[0])
    memory = [
        torch.empty(num_blocks, *small[0].shape[1:], dtype=torch.uint8, device=DEVICE)
        for _ in small
    ]
    for cache, blocks in zip(memory, small, strict=True):  # the rest is never paged in
        cache[first:] = blocks.view(torch.uint8).to(DEVICE)
    moved = replace(segment, block_ids=[first + block for block in segment.block_ids])
    huge = replace(
        paged,
        segments=(moved,),
        k_cache=memory[0].view(torch.float8_e4m3fn),
        v_cache=memory[1].view(torch.float8_e4m3fn),
    )
    got = huge.run(shape, scales=scales)  # a failing assertion would print what it names
    assert torch.equal(got, want)


# --- the promised bits ---


@BOTH_MODES
def test_a_row_is_its_own_business(is_deterministic: bool) -> None:
    """For one shape of the launch: alone, in a mix, and in other tiles of another mix."""
    parts = [random_rows(root, rows, group=3, seed=i) for i, (root, rows) in enumerate(MIX[:6])]
    paged = lay(parts, num_padding=2)
    shape = paged.shape(is_deterministic, num_splits=3)
    got = paged.run(shape)
    turned = (
        lay(parts[::-1], block_size=32, seed=1)
        .run(shape)
        .split([len(part.q) for part in parts[::-1]])[::-1]
    )
    for segment, part, other in zip(paged.segments, parts, turned, strict=True):
        alone = lay([part], block_size=48, seed=2).run(shape)
        assert torch.equal(got[segment.start : segment.start + segment.num_rows], alone)
        assert torch.equal(other, alone)


@BOTH_MODES
@pytest.mark.parametrize(("root", "num_nodes", "window"), [(59, 13, None), (505, 21, 9)])
def test_the_order_of_siblings(
    root: int, num_nodes: int, window: int | None, is_deterministic: bool
) -> None:
    rows = random_rows(root, random_parents(num_nodes, 4, seed=0))
    other, order = rows.permuted(seed=1)
    assert order != sorted(order)
    one, two = lay([rows], window=window), lay([other], window=window, seed=1)
    shape = one.shape(is_deterministic, num_processors=16)
    want, got = one.run(shape)[order], two.run(shape)
    if is_deterministic:
        assert torch.equal(got, want)
    else:
        check_error(got, got, want)


TREES = [
    *((root, tree(7, 2), None) for root in (0, 1, 60, 63, 64, 508, 511, 512)),
    *((root, tree(7, 2), 40) for root in (62, 510)),
    (1021, tree(7, 2), 600),
]


@pytest.mark.parametrize(("root", "parents", "window"), TREES)
def test_a_path_has_the_same_bits_however_it_is_laid(
    root: int, parents: tuple[int, ...], window: int | None
) -> None:
    """Drafted in a tree or as a chain, decoded plainly, in a chunk, or accepted in part."""
    check_ways(root, parents, window, {})


def test_a_long_path_has_the_same_bits_however_it_is_laid() -> None:
    """Over ends of tiles and of splits (both shortened), with a sibling now and then."""
    parents = (-1, *(node - 1 - (node % 9 == 0) for node in range(1, 25)))
    check_ways(20, parents, None, {"block_n": 16, "split_size": 32, "num_splits": 2})


def check_ways(
    root: int, parents: tuple[int, ...], window: int | None, changes: dict[str, int]
) -> None:
    rows = random_rows(root, parents, group=3, seed=root)
    path = max((rows.path(node) for node in range(len(parents))), key=len)
    chain = rows.take(root, path, None)
    earlier = min(root, 37)
    chunk = random_rows(root - earlier, earlier + len(path), group=3)
    chunk = replace(chunk, q=torch.cat((chunk.q[:earlier], chain.q)), k=chain.k, v=chain.v)
    plain = [
        Rows(end - 1, None, chain.q[end - 1 - root : end - root], chain.k[:end], chain.v[:end])
        for end in range(root + 1, root + len(path) + 1)
    ]
    accepted, nodes = rows.committed(path, 2)

    def run(parts: list[Rows], times: int, block_size: int) -> Tensor:
        paged = lay(parts, window=window, block_size=block_size, seed=times)
        shape = paged.shape(True, **changes)
        return paged.run(replace(shape, num_splits=shape.num_splits * times))

    want = run([chain], 1, 16)
    drafted, chunked = run([rows, chunk], 1, 32).split([len(rows.q), len(chunk.q)])
    assert torch.equal(drafted[path], want)
    assert torch.equal(chunked[earlier:], want)
    decoded, rest = run([*plain, accepted], 2, 48).split([len(plain), len(nodes)])
    assert torch.equal(decoded, want)
    assert torch.equal(rest[[nodes.index(node) for node in path[2:]]], want[2:])
