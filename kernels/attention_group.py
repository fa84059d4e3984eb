"""AttentionGroup: rows of one request that share a paged prefix, and what each may see."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ROW_TILE = 32  # query rows per group and per matrix product: see docs/adr/0003


@dataclass(frozen=True)
class AttentionGroup:
    """Query rows [start, end) of the batch, at most ROW_TILE of them.

    Tiles are the blocks of the KV cache: tile t holds absolute positions
    [t * block_size, (t + 1) * block_size). All rows read the tiles in `blocks`.

    A chain (a prefill chunk, plain decoding, a draft tree without branches) needs no more, for a
    key's slot is where its position says. Rows of a branching tree also read `tail_slots`
    [num_rows, num_tail * block_size]: per row, the slots of its own ancestors laid out by
    position, so that a key is summed in the same lane whether it was drafted or committed.

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
