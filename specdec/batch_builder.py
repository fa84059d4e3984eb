"""BatchBuilder: a ragged batch in the making, segment by segment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdec.kernels.batch import Batch
from specdec.kernels.segment import Segment
from specdec.kv_cache import slot_at


class BatchBuilder:
    """Lays rows of several requests one after the other.

    Example: a root and two children in the blocks 7 and 2, logits of all three:
        builder = BatchBuilder(block_size=32)
        builder.add([7, 2], [5, 8, 9], root=40, ancestors=(0b1, 0b11, 0b101), wanted=range(3))
        batch = builder.build()
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._segments: list[Segment] = []
        self._logit_rows: list[int] = []
        self._first_logit = [0]

    def add(
        self,
        table: Sequence[int],
        token_ids: Sequence[int],
        root: int,
        ancestors: tuple[int, ...] | None = None,
        wanted: Iterable[int] | None = None,
    ) -> None:
        """Rows of one request: row i goes to the slot of position root + i of its block table.

        ancestors: see Segment, None for a chain; wanted: the rows, counted from the segment's
        first, whose logits are asked for as one more decode step; None for a prefill chunk.
        """
        first, count = len(self._token_ids), len(token_ids)
        segment = Segment(first, count, root, tuple(table), ancestors)
        self._segments.append(segment)
        self._token_ids.extend(token_ids)
        self._positions.extend(segment.positions)
        size = self._block_size
        self._slots.extend(slot_at(table, p, size) for p in range(root, root + count))
        if wanted is not None:
            self._logit_rows.extend(first + row for row in wanted)
            self._first_logit.append(len(self._logit_rows))

    def build(self) -> Batch:
        """The batch as it stands."""
        return Batch(
            token_ids=tuple(self._token_ids),
            positions=tuple(self._positions),
            slots=tuple(self._slots),
            segments=tuple(self._segments),
            logit_rows=tuple(self._logit_rows),
            first_logit=tuple(self._first_logit),
        )
