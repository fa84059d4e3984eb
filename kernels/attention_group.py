"""AttentionGroup: rows of one request that share a paged prefix, and what each may see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.segment import Segment

ROW_TILE = 32  # query rows per group and per matrix product: see docs/adr/0003


@dataclass(frozen=True)
class AttentionGroup:
    """Query rows [start, end) of the batch, at most ROW_TILE of them.

    Tiles are the blocks of the KV cache: tile t holds absolute positions
    [t * block_size, (t + 1) * block_size). All rows read the tiles in `blocks`.

    A chain needs no more, for a key's slot is where its position says. Rows of a branching tree
    also read `tail_slots` [num_rows, num_tail * block_size]: per row, the slots of its own
    ancestors laid out by position, so that a key is summed in the same lane whether it was drafted
    or committed.

    `bias` [num_masked, 1, num_rows, block_size] is 0 where a row may attend and -inf elsewhere; it
    covers the last `num_masked` tiles, tail included. Earlier tiles are visible to all rows.
    """

    start: int
    end: int
    blocks: slice | Tensor  # a run of neighbouring block ids, or int64 [num_blocks]
    num_blocks: int
    bias: Tensor
    tail_slots: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.end - self.start


def attention_groups(
    segments: Sequence[Segment], block_size: int, window: int | None
) -> tuple[AttentionGroup, ...]:
    """What the rows of all segments see; `window` is the sliding window, None = full attention."""
    return tuple(
        _group(segment, rows, block_size, window)
        for segment in segments
        for rows in _row_tiles(segment.num_rows)
    )


def _row_tiles(num_rows: int) -> Iterator[range]:
    for first in range(0, num_rows, ROW_TILE):
        yield range(first, min(first + ROW_TILE, num_rows))


def _group(segment: Segment, rows: range, block_size: int, window: int | None) -> AttentionGroup:
    is_chain, root = segment.ancestors is None, segment.root
    reach = torch.tensor(segment.positions[rows.start : rows.stop])[:, None]
    num_tiles = int(reach.max()) // block_size + 1
    num_shared = num_tiles if is_chain else root // block_size
    first_own = int(reach.min()) if is_chain else root
    first_masked = 0 if window is not None else first_own // block_size
    lanes = torch.arange(first_masked * block_size, num_tiles * block_size)
    is_visible = lanes <= reach  # [num_rows, lanes]
    if window is not None:
        is_visible &= lanes > reach - window
    bias = torch.zeros(is_visible.shape).masked_fill_(~is_visible, float("-inf"))
    bias = bias.view(len(rows), -1, block_size).transpose(0, 1).unsqueeze(1)
    tail = range(num_shared * block_size, num_tiles * block_size)
    return AttentionGroup(
        segment.start + rows.start,
        segment.start + rows.stop,
        _run_or_index(segment.block_ids[:num_shared]),
        num_shared,
        bias.contiguous(),
        None if is_chain else _tail_slots(segment, rows, tail, block_size),
    )


def _tail_slots(segment: Segment, rows: range, tail: range, block_size: int) -> Tensor:
    """Slots by position for each row: committed ones, then its ancestors. int64 [rows, tail]."""

    def slot(place: int) -> int:
        return segment.block_ids[place // block_size] * block_size + place % block_size

    committed = [slot(position) for position in range(tail.start, segment.root)]
    lanes = []
    for row in rows:
        slots = committed + [slot(segment.root + node) for node in segment.path(row)]
        lanes.append(slots + [slots[-1]] * (len(tail) - len(slots)))  # masked lanes: any slot
    return torch.tensor(lanes)


def _run_or_index(blocks: Sequence[int]) -> slice | Tensor:
    """Neighbouring blocks as a slice, which reads the cache in place; others as an index."""
    if not blocks or list(blocks) == list(range(blocks[0], blocks[0] + len(blocks))):
        start = blocks[0] if blocks else 0
        return slice(start, start + len(blocks))
    return torch.tensor(blocks)
