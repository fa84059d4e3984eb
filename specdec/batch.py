"""Batch: the packed tensors of one target forward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.kernels.attention_group import AttentionGroup


@dataclass(frozen=True)
class Batch:
    """Query tokens of all requests, one ragged batch, padded at the end to the model's `min_rows`.

    `groups` are by sliding window, None = full attention.
    `logit_rows` are the rows whose logits are wanted: every node of every draft tree, in the order
    of the decode steps; decode step i owns logits [first_logit[i], first_logit[i + 1]).
    """

    token_ids: Tensor  # int64 [num_rows]
    positions: Tensor  # int64 [num_rows]
    slots: Tensor  # int64 [num_rows less padding]
    groups: dict[int | None, tuple[AttentionGroup, ...]]
    logit_rows: Tensor  # int64 [num_logits]
    first_logit: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)
