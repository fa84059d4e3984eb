"""Batch: the rows of one target forward, as the host states them."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.kernels.segment import Segment


@dataclass(frozen=True)
class Batch:
    """Query tokens of all requests in one ragged batch; every row belongs to one segment.

    `logit_rows` are the rows whose logits are wanted: every node of every draft tree, in the order
    of the decode steps; decode step i owns logits [first_logit[i], first_logit[i + 1]).
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    segments: tuple[Segment, ...]
    logit_rows: tuple[int, ...]
    first_logit: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)
