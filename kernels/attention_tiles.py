"""AttentionTiles: a step's segments as the integer tables that the Triton kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.segment import Segment

MAX_WORDS = 4  # 64-bit ancestor words: at most 256 nodes, root included
# Deterministic mode: a split is a fixed range of absolute positions, so that a row's sums run in
# the same order whatever is drafted beside it.
FIXED_SPLIT = 512


@dataclass(frozen=True)
class Processors:
    """What a device offers a launch: `count` multiprocessors, and whether 128-row tiles fit one."""

    count: int
    has_large_tiles: bool

    @classmethod
    def of(cls, device: torch.device) -> Processors:
        """The device's own, or those of a small GPU where kernels are only interpreted."""
        if device.type != "cuda":
            return cls(count=8, has_large_tiles=False)
        properties = torch.cuda.get_device_properties(device)
        has_large_tiles = torch.version.hip is None and properties.major in (9, 10)
        return cls(properties.multi_processor_count, has_large_tiles)


@dataclass(frozen=True)
class TileShape:
    """What a launch of the kernels is compiled and sized for.

    A tile packs `block_m // group` rows times the `group` query heads of one key head; keys come
    `block_n` at a time. `split_size` 0 cuts a segment's keys into `num_splits` equal parts, else
    splits are that many absolute positions long and `num_splits` of them cover the longest row.
    """

    group: int  # query heads per key head
    block_m: int
    block_n: int
    num_splits: int
    split_size: int
    words: int

    @property
    def rows_per_tile(self) -> int:
        return self.block_m // self.group

    @property
    def is_deterministic(self) -> bool:
        return self.split_size > 0


@dataclass(frozen=True)
class AttentionTiles:
    """Tables of one step, int32 but for `ancestors`; all on the kernels' device.

    A tile is (`tile_segments[t]`, its first row within the segment `tile_rows[t]`). A segment has
    rows [first_rows[s], first_rows[s] + num_rows[s]) of the batch, and place i of its request lies
    in block `block_tables[s, i // block_size]`. All its rows read the keys of positions below
    `shared_lens[s]`, each up to its own position. After them come `num_own[s]` places from
    `roots[s]` on, whose keys a row sees by its ancestor words: the branching trees.

    In deterministic mode a branching tree shares whole tiles only, and `tail_rows` lists its rows
    (with their segments in `tail_segments`): each reads the rest in the order of positions.
    """

    tile_segments: Tensor  # [num_tiles]
    tile_rows: Tensor  # [num_tiles]
    first_rows: Tensor  # [num_segments]
    num_rows: Tensor  # [num_segments]
    roots: Tensor  # [num_segments]
    shared_lens: Tensor  # [num_segments]
    num_own: Tensor  # [num_segments]
    block_tables: Tensor  # [num_segments, blocks of the longest]
    positions: Tensor  # [num_rows of the batch]
    ancestors: Tensor  # int64 [num_rows of the batch, words]
    tail_rows: Tensor  # [num_tail]
    tail_segments: Tensor  # [num_tail]
    shape: TileShape


def tile_shape(
    segments: Sequence[Segment],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    is_deterministic: bool,
    processors: Processors,
) -> TileShape:
    """Shape of the launch for these segments on a device. itemsize: bytes per number of q."""
    group = num_heads // num_kv_heads
    longest = max((max(s.positions) + 1 for s in segments), default=1)
    most_rows = max((s.num_rows for s in segments), default=1)
    tree_rows = max((s.num_rows for s in segments if s.ancestors is not None), default=1)
    words = power_of_two(-(-tree_rows // 64))
    assert words <= MAX_WORDS, "a tree of more than 256 nodes"
    largest = largest_block_m(head_dim, itemsize)
    smallest = max(16, power_of_two(group))
    block_n = block_of_keys(head_dim)
    if is_deterministic:
        num_splits = power_of_two(-(-longest // FIXED_SPLIT))
        return TileShape(group, max(largest, smallest), block_n, num_splits, FIXED_SPLIT, words)
    if processors.has_large_tiles and itemsize <= 2 and head_dim <= 128:
        largest *= 2
    block_m = max(smallest, min(largest, power_of_two(most_rows * group)))
    num_tiles = sum(-(-s.num_rows // (block_m // group)) for s in segments)
    # Two programs of a small tile run on a multiprocessor at once; a large one needs its registers.
    num_slots = processors.count * (2 if block_m <= 32 else 1)
    num_splits = splits(longest, num_tiles * num_kv_heads, num_slots, block_m)
    return TileShape(group, block_m, block_n, num_splits, 0, words)


def largest_block_m(head_dim: int, itemsize: int) -> int:
    """Rows of a tile whose queries and sums every target holds; in deterministic mode of any tile.

    Example: 64 for heads of 128 in bf16, 32 in fp32, and 32 for heads of 256 in bf16.
    """
    return max(16, min(64, 2**14 // (power_of_two(head_dim) * itemsize)))


def block_of_keys(head_dim: int) -> int:
    """Keys per tile of a kernel: a divisor of 64 and of FIXED_SPLIT."""
    return 32 if head_dim > 128 else 64


def splits(context: int, num_programs: int, num_slots: int, block_m: int) -> int:
    """How many parts a context is cut into, so that a short tree still fills the chip.

    The fixed table, in powers of two of the context: the parts of at least 256 keys, 64 at most,
    with the least cost in passes over the keys at full speed. That is the time of the waves in
    which `num_slots` programs run at once, plus what a part adds: `block_m` partial means in fp32,
    written and read, against the context's keys and values in 16 bits.

    Example: 32k keys, 8 key heads, 132 multiprocessors: one row, `splits(32768, 8, 264, 16)`, gives
    32 parts; 64 nodes in two tiles of 128, `splits(32768, 16, 132, 128)`, give 8.
    """
    keys = power_of_two(context)
    num_programs = max(1, num_programs)

    def cost(parts: int) -> float:
        waves = -(-num_programs * parts // num_slots)
        return waves * num_slots / (num_programs * parts) + 2 * block_m * parts / keys

    choices = [1 << i for i in range(7) if keys >> i >= 256]
    return min(choices or [1], key=cost)


def make_tiles(
    segments: Sequence[Segment],
    shape: TileShape,
    *,
    num_rows: int,
    device: torch.device,
) -> AttentionTiles:
    """The tables of these segments; rows of the batch beyond theirs are padding and give zero."""
    columns = tile_columns(segments, shape, num_rows=num_rows)
    width = max((len(s.block_ids) for s in segments), default=0) or 1
    block_tables = torch.zeros(len(columns["first_rows"]), width, dtype=torch.int32)
    ancestors = torch.zeros(num_rows, shape.words, dtype=torch.int64)
    fill_tables(segments, block_tables, ancestors)
    return AttentionTiles(
        block_tables=block_tables.to(device),
        ancestors=ancestors.to(device),
        shape=shape,
        **{
            name: torch.tensor(values, dtype=torch.int32).to(device)
            for name, values in columns.items()
        },
    )


def tile_columns(
    segments: Sequence[Segment], shape: TileShape, *, num_rows: int
) -> dict[str, list[int]]:
    """The one-dimensional tables of AttentionTiles, by name."""
    every = [*segments, *_padding(segments, num_rows)]
    is_fixed = shape.is_deterministic
    tiles = [
        (i, row) for i, s in enumerate(every) for row in range(0, s.num_rows, shape.rows_per_tile)
    ]
    tails = [
        (s.start + row, i)
        for i, s in enumerate(every)
        if s.ancestors is not None and is_fixed
        for row in range(s.num_rows)
    ]
    shared = [_shared_len(s, shape) for s in segments]
    positions = [position for s in segments for position in s.positions]
    return {
        "tile_segments": [segment for segment, _ in tiles],
        "tile_rows": [row for _, row in tiles],
        "first_rows": [s.start for s in every],
        "num_rows": [s.num_rows for s in every],
        "roots": [s.root for s in every],
        "shared_lens": shared + [0] * (len(every) - len(segments)),
        "num_own": [0 if s.ancestors is None or is_fixed else s.num_rows for s in every],
        "positions": positions + [0] * (num_rows - len(positions)),
        "tail_rows": [row for row, _ in tails],
        "tail_segments": [segment for _, segment in tails],
    }


def fill_tables(segments: Sequence[Segment], block_tables: Tensor, ancestors: Tensor) -> None:
    """Write the two-dimensional tables of AttentionTiles into zeros."""
    for i, s in enumerate(segments):
        if s.block_ids:
            block_tables[i, : len(s.block_ids)] = torch.tensor(s.block_ids, dtype=torch.int32)
        if s.ancestors is not None:
            words = ancestor_words(s.ancestors, ancestors.shape[1])
            ancestors[s.start : s.start + s.num_rows] = words


def ancestor_words(masks: Sequence[int], words: int) -> Tensor:
    """Ancestor masks as 64-bit words: bit j % 64 of word j // 64 is bit j. int64 [n, words].

    Example: `ancestor_words([1, 3], 1).tolist() == [[1], [3]]`.
    """
    data = bytearray(b"".join(mask.to_bytes(8 * words, "little") for mask in masks))
    return torch.frombuffer(data, dtype=torch.int64).view(len(masks), words)


def _shared_len(segment: Segment, shape: TileShape) -> int:
    """Positions that all rows of a segment read in place."""
    if segment.ancestors is None:
        return segment.root + segment.num_rows  # a chain: causal, its own keys included
    if shape.is_deterministic:
        return segment.root // shape.block_n * shape.block_n
    return segment.root


def _padding(segments: Sequence[Segment], num_rows: int) -> list[Segment]:
    """A segment without keys for the rows at the end that belong to none."""
    end = max((s.start + s.num_rows for s in segments), default=0)
    return [Segment(end, num_rows - end, 0, ())] if end < num_rows else []


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
