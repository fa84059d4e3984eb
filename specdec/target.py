"""Target: what the engine needs of a target model, whatever computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from specdec.model_config import ModelConfig


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


class Target(Protocol):
    """A model with its weights in memory: `TargetModel` or `NativeModel`."""

    config: ModelConfig

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def logits_dtype(self) -> torch.dtype:
        """What its logits are in."""

    def kv_bytes_per_block(self, kv: str, block_size: int) -> int:
        """Memory of one block of a KV cache of this precision over all layers, in bytes."""

    def make_kv_cache(self, kv: str, *, num_blocks: int, block_size: int) -> PagedCache:
        """An empty KV cache of this precision, `auto` being the model's choice."""
