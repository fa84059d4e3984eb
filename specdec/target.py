"""Target: what the engine needs of a target model, whatever computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.config import WeightPrecision
from specdec.model_config import ModelConfig


@dataclass(frozen=True)
class TargetOutput:
    """What a forward gives for each row that wants logits; valid until the next forward.

    `hidden` are the states after the last norm, which the head reads: logits = hidden W^T.
    """

    logits: Tensor  # [num_logits, vocab]
    hidden: Tensor  # [num_logits, hidden_size]

    def first(self, count: int) -> TargetOutput:
        """Without the rows that padding added."""
        return TargetOutput(self.logits[:count], self.hidden[:count])


class PagedCache(Protocol):
    """Keys and values addressed by slot = block_id * block_size + offset."""

    num_blocks: int
    block_size: int

    @property
    def device(self) -> torch.device:
        """Where it lies."""

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy slots for all layers at once; reads everything before it writes."""

    def scrub(self, block_ids: Sequence[int]) -> None:
        """Zero blocks."""


class Linear(Protocol):
    """y = x W^T, packed."""

    out_features: int
    in_features: int

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in_features]. Returns [num_rows, out_features]."""


class Target(Protocol):
    """A model with its weights in memory: `TargetModel` or `NativeModel`."""

    config: ModelConfig

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def logits_dtype(self) -> torch.dtype:
        """What its logits are in."""

    @property
    def precision(self) -> WeightPrecision:
        """Of its weights: bf16, fp16, fp32, int8 or int4."""

    @property
    def weight_bytes(self) -> int:
        """Memory of its weights."""

    def make_linear(self, weight: Tensor) -> Linear:
        """A matrix [out_features, in_features] of the caller's own, packed as the model's are."""

    def kv_bytes_per_block(self, kv: str, block_size: int) -> int:
        """Memory of one block of a KV cache of this precision over all layers, in bytes."""

    def make_kv_cache(self, kv: str, *, num_blocks: int, block_size: int) -> PagedCache:
        """An empty KV cache of this precision, `auto` being the model's choice."""
