"""Segment: neighbouring rows of one request, a prefill chunk or a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


def ancestor_masks(parents: Sequence[int]) -> tuple[int, ...]:
    """Ancestor mask of each node: `anc[i] = anc[parent] | 1 << i`; the root's parent is -1.

    Bit j of entry i says that node i may attend to node j; a node is its own ancestor.

    Example: `ancestor_masks((-1, 0, 0)) == (0b1, 0b11, 0b101)`.
    """
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return tuple(masks)


@dataclass(frozen=True)
class Segment:
    """Rows [start, start + num_rows) of the batch, all of one request.

    Keys of positions before `root` are committed and seen by every row. Row i writes its own key to
    the slot of position `root + i`. In a chain (a prefill chunk, plain decoding, a draft tree
    without branches) row i also stands at that position. In a branching tree `ancestors[i]` has
    bit j set if row i descends from row j or is row j, and row i stands at root + its depth.

    `block_ids` orders the request's blocks: position p lies in `block_ids[p // block_size]`.

    Example: `Segment(0, 3, 40, [7, 2], (0b1, 0b11, 0b101))` is a root with two children.
    """

    start: int
    num_rows: int
    root: int
    block_ids: Sequence[int]
    ancestors: tuple[int, ...] | None = None  # set for a branching tree

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Absolute position of each row."""
        if self.ancestors is None:
            return tuple(range(self.root, self.root + self.num_rows))
        return tuple(self.root + mask.bit_count() - 1 for mask in self.ancestors)

    def path(self, row: int) -> list[int]:
        """Rows from the root to `row`, both included: parents come before children."""
        assert self.ancestors is not None
        mask = self.ancestors[row]
        return [node for node in range(row + 1) if mask >> node & 1]
