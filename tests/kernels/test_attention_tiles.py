"""AttentionTiles: the table of splits, the shapes of launches, each row and each key just once."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels.attention_tiles import (
    FIXED_SPLIT,
    MAX_WORDS,
    AttentionTiles,
    Processors,
    TileShape,
    ancestor_words,
    block_of_keys,
    largest_block_m,
    make_tiles,
    splits,
    tile_shape,
)
from specdec.kernels.segment import Segment, ancestor_masks
from tests.kernels.device import DEVICE
from tests.kernels.paged import random_parents, visible

SIZES = (0, 1, 2, 3, 100, 255, 256, 257, 511, 512, 513, 1000, 4096, 4097, 32768, 10**6)
COUNTS = (1, 2, 3, 7, 8, 9, 64, 132, 133, 500)


def is_power_of_two(n: int) -> bool:
    return n.bit_count() == 1


# --- segments ---


def test_positions_and_paths() -> None:
    segment = Segment(0, 3, 40, [7, 2], (0b1, 0b11, 0b101))
    assert segment.positions == (40, 41, 41)
    assert [segment.path(row) for row in range(3)] == [[0], [0, 1], [0, 2]]
    assert Segment(5, 3, 40, [7, 2]).positions == (40, 41, 42)


@given(num_nodes=st.integers(1, 256), reach=st.sampled_from([1, 3, 256]), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_positions_and_paths_of_any_tree(num_nodes: int, reach: int, seed: int) -> None:
    parents = random_parents(num_nodes, reach, seed)
    segment = Segment(9, num_nodes, 100, [], ancestor_masks(parents))
    for node, parent in enumerate(parents):
        above = segment.path(parent) if node else []
        assert segment.path(node) == [*above, node]
        assert segment.positions[node] == 100 + len(above)


# --- the table of splits ---


def test_splits_of_one_tree() -> None:
    assert splits(32768, 8, 264, 16) == 32  # 256 programs in 264 slots
    assert splits(32768, 16, 132, 128) == 8  # 128 in 132
    assert splits(32768, 8, 256, 16) == 32
    assert splits(511, 1, 132, 16) == 2  # 512 keys make two parts
    assert splits(256, 1, 132, 16) == splits(1, 1, 132, 16) == splits(0, 0, 1, 16) == 1
    assert splits(10**6, 1, 10**4, 16) == 64
    assert splits(10**6, 500, 500, 128) == 1  # full as it is
    assert splits(131072, 160, 132, 64) > 1  # one wave and a fifth would cost two


@pytest.mark.parametrize("num_slots", COUNTS)
def test_splits_cost_least(num_slots: int) -> None:
    """Against the words: waves at full speed, and 8 bytes a lane and part against 4 a key."""
    for context, num_programs, block_m in itertools.product(SIZES, COUNTS, (16, 64, 128)):
        parts = splits(context, num_programs, num_slots, block_m)
        bucket = 1 << max(0, context - 1).bit_length()
        assert is_power_of_two(parts) and parts <= 64
        assert parts == 1 or bucket // parts >= 256
        costs = {}
        for other in (1, 2, 4, 8, 16, 32, 64):
            if other == 1 or bucket // other >= 256:
                waves = math.ceil(num_programs * other / num_slots)
                costs[other] = waves * num_slots / num_programs / other
                costs[other] += other * block_m * 8 / (4 * bucket)
        assert costs[parts] == pytest.approx(min(costs.values()))
        assert parts == splits(bucket, num_programs, num_slots, block_m)


# --- shapes ---


def segments_of(*sizes: tuple[int, int, bool], block_size: int = 16) -> list[Segment]:
    """Segments one behind the other from (root, number of rows, whether it is a tree)."""
    segments, start = [], 0
    for index, (root, num_rows, is_tree) in enumerate(sizes):
        masks = ancestor_masks(random_parents(num_rows, 7, seed=index)) if is_tree else None
        blocks = [100 * index + i for i in range(-(-(root + num_rows) // block_size))]
        segments.append(Segment(start, num_rows, root, blocks, masks))
        start += num_rows
    return segments


def shape_of(
    segments: Sequence[Segment],
    group: int,
    is_deterministic: bool,
    *,
    head_dim: int = 64,
    itemsize: int = 2,
    num_processors: int = 132,
    has_large_tiles: bool = True,
) -> TileShape:
    return tile_shape(
        segments,
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        itemsize=itemsize,
        is_deterministic=is_deterministic,
        processors=Processors(num_processors, has_large_tiles),
    )


@pytest.mark.parametrize("has_large_tiles", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 16, 28, 64])
def test_tiles_are_as_large_as_the_rows_need(
    group: int, head_dim: int, has_large_tiles: bool
) -> None:
    largest = {16: 64, 64: 64, 80: 64, 128: 64, 256: 32}[head_dim]
    largest *= 2 if has_large_tiles and head_dim <= 128 else 1
    largest = max(largest, group)
    for num_rows in (1, 2, 5, 16, 17, 300):
        segments = segments_of((700, num_rows, False), (3, 1, False))
        shape = shape_of(segments, group, False, head_dim=head_dim, has_large_tiles=has_large_tiles)
        assert is_power_of_two(shape.block_m)
        assert 16 <= shape.block_m <= largest
        assert shape.group == group <= shape.block_m
        assert 0 < shape.rows_per_tile * group <= shape.block_m
        # One tile if the largest holds the rows; and then not twice as large as need be.
        assert shape.rows_per_tile >= num_rows or shape.block_m == largest
        assert shape.block_m == 16 or shape.block_m // 2 < num_rows * group
        assert shape.block_n == (32 if head_dim == 256 else 64)
        assert not shape.is_deterministic
        num_tiles = -(-num_rows // shape.rows_per_tile) + 1
        longest = 700 + num_rows
        slots = 132 if shape.block_m > 32 else 264
        assert shape.num_splits == splits(longest, 2 * num_tiles, slots, shape.block_m)


@pytest.mark.parametrize("group", [1, 3, 8, 64, 71])
def test_deterministic_tiles_do_not_depend_on_the_rows(group: int) -> None:
    for root, num_rows, is_tree in itertools.product((0, 509, 5000), (1, 4, 60), (False, True)):
        segments = segments_of((root, num_rows, is_tree), (0, 2, False))
        shape = shape_of(segments, group, True, num_processors=num_rows)
        assert (shape.block_m, shape.split_size) == (128 if group == 71 else 64, 512)
        assert shape.is_deterministic
        longest = max(max(segment.positions) + 1 for segment in segments)
        assert is_power_of_two(shape.num_splits)
        assert shape.num_splits * FIXED_SPLIT >= longest
        assert shape.num_splits == 1 or shape.num_splits // 2 * FIXED_SPLIT < longest


def test_tiles_are_smaller_where_numbers_are_larger() -> None:
    """A tile of fp32 and heads of 256 once asked for more shared memory than a GPU has."""
    sizes = {(64, 2): 64, (128, 2): 64, (256, 2): 32, (64, 4): 64, (128, 4): 32, (256, 4): 16}
    for (head_dim, itemsize), block_m in sizes.items():
        assert largest_block_m(head_dim, itemsize) == block_m
        segments = segments_of((700, 60, True))
        shape = shape_of(segments, 4, True, head_dim=head_dim, itemsize=itemsize)
        assert shape.block_m == block_m
        free = shape_of(segments, 4, False, head_dim=head_dim, itemsize=itemsize)
        assert free.block_m == block_m * (2 if itemsize == 2 and head_dim <= 128 else 1)


def test_more_nodes_than_words_hold_are_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        shape_of(segments_of((5, 257, True)), 1, False)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_words(is_deterministic: bool) -> None:
    for num_nodes, words in ((1, 1), (64, 1), (65, 2), (128, 2), (129, 4), (256, 4)):
        segments = segments_of((5, num_nodes, True), (0, 300, False))
        assert shape_of(segments, 1, is_deterministic).words == words <= MAX_WORDS
    assert shape_of(segments_of((0, 300, False)), 1, is_deterministic).words == 1


def test_blocks_of_keys_divide_words_and_splits() -> None:
    for head_dim in (16, 32, 64, 80, 96, 128, 256):
        assert 64 % block_of_keys(head_dim) == FIXED_SPLIT % block_of_keys(head_dim) == 0


# --- tables ---


def seen(tiles: AttentionTiles, s: int, node: int) -> list[int]:
    """Places that a row of segment s attends to, as the kernels read the tables, each once."""
    row = int(tiles.first_rows[s]) + node
    position, root = int(tiles.positions[row]), int(tiles.roots[s])
    words: list[int] = [word % 2**64 for word in tiles.ancestors[row].tolist()]

    def is_ancestor(other: int) -> bool:
        return words[other // 64] >> other % 64 & 1 == 1

    places = list(range(min(int(tiles.shared_lens[s]), position + 1)))
    places += [root + other for other in range(int(tiles.num_own[s])) if is_ancestor(other)]
    for tail, segment in zip(tiles.tail_rows.tolist(), tiles.tail_segments.tolist(), strict=True):
        if tail == row:
            assert segment == s
            places += range(int(tiles.shared_lens[s]), root)
            places += [root + n for n in range(int(tiles.num_rows[s])) if is_ancestor(n)]
    return places


JOBS = st.tuples(st.integers(0, 140), st.integers(1, 70), st.booleans())


@pytest.mark.parametrize("is_deterministic", [False, True])
@given(
    jobs=st.lists(JOBS, max_size=4),
    num_padding=st.sampled_from([0, 1, 40]),
    group=st.sampled_from([1, 3, 8]),
)
@settings(max_examples=25, deadline=None)
def test_every_row_and_every_key_once(
    is_deterministic: bool, jobs: list[tuple[int, int, bool]], num_padding: int, group: int
) -> None:
    segments = segments_of(*jobs)
    num_rows = sum(segment.num_rows for segment in segments) + num_padding
    shape = shape_of(segments, group, is_deterministic)
    tiles = make_tiles(segments, shape, num_rows=num_rows, device=DEVICE)
    assert tiles.shape == shape
    covered = []
    for s, first in zip(tiles.tile_segments.tolist(), tiles.tile_rows.tolist(), strict=True):
        last = min(first + shape.rows_per_tile, int(tiles.num_rows[s]))
        covered += [int(tiles.first_rows[s]) + row for row in range(first, last)]
    assert sorted(covered) == list(range(num_rows))

    for s, segment in enumerate(segments):
        width = len(segment.block_ids)
        assert tiles.block_tables[s, :width].tolist() == list(segment.block_ids)
        assert not tiles.block_tables[s, width:].any()
        for node, row in enumerate(visible(segment, None)):
            assert sorted(seen(tiles, s, node)) == row.nonzero().flatten().tolist()
        if is_deterministic and segment.ancestors is not None:
            assert tiles.shared_lens[s] % shape.block_n == 0
    if num_padding:
        assert not any(seen(tiles, len(segments), node) for node in range(num_padding))
    trees = [s for s in segments if s.ancestors is not None]
    tails = [s.start + row for s in trees for row in range(s.num_rows)]
    assert tiles.tail_rows.tolist() == (tails if is_deterministic else [])


def test_types_of_tables() -> None:
    segments = segments_of((30, 70, True), (0, 4, False))
    tiles = make_tiles(segments, shape_of(segments, 2, True), num_rows=80, device=DEVICE)
    tables = {name: table for name, table in vars(tiles).items() if name != "shape"}
    assert tables.pop("ancestors").dtype == torch.int64
    assert {table.dtype for table in tables.values()} == {torch.int32}
    assert tiles.ancestors.shape == (80, 2)
    assert tiles.block_tables.shape == (3, 7)  # the padding's is empty
    assert {table.device.type for table in tables.values()} == {DEVICE.type}


def test_no_rows() -> None:
    tiles = make_tiles([], shape_of([], 2, False), num_rows=0, device=DEVICE)
    assert len(tiles.tile_rows) == len(tiles.tail_rows) == len(tiles.positions) == 0


# --- ancestor words ---


def test_ancestor_words_of_single_bits() -> None:
    assert ancestor_words([1, 3], 1).tolist() == [[1], [3]]
    assert ancestor_words([1 << 62, 1 << 63], 1).tolist() == [[2**62], [-(2**63)]]
    lowest, highest = [1, 0, 0, 0], [0, 0, 0, -(2**63)]
    assert ancestor_words([1, 1 << 255, 2**256 - 1], 4).tolist() == [lowest, highest, [-1] * 4]
    assert ancestor_words([1 << 64 | 1 << 63], 2).tolist() == [[-(2**63), 1]]


@pytest.mark.parametrize("words", [1, 2, 4])
def test_ancestor_words_are_the_masks(words: int) -> None:
    rng = random.Random(words)
    masks = [rng.getrandbits(64 * words) for _ in range(50)]
    rows = ancestor_words(masks, words).tolist()
    for mask, row in zip(masks, rows, strict=True):
        assert sum(word % 2**64 << 64 * index for index, word in enumerate(row)) == mask
