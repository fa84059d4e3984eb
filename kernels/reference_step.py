"""ReferenceStep: the ops of one step in plain PyTorch, on any device; the CPU's path."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from specdec.kernels import reference as ops
from specdec.kernels.attention_group import AttentionGroup, attention_groups
from specdec.kernels.batch import Batch
from specdec.kernels.layer_cache import LayerCache
from specdec.kernels.step_ops import HeadShape


class ReferenceStep:
    """Implements StepOps; rows are invariant (docs/adr/0003) when the batch is padded for it.

    cos, sin: rotation tables fp32 [max_len, head_dim], as kernels.reference.rope wants them.
    """

    def __init__(
        self,
        batch: Batch,
        shape: HeadShape,
        cos: Tensor,
        sin: Tensor,
        *,
        block_size: int,
        num_padding: int = 0,
    ) -> None:
        self._batch = batch
        self._shape = shape
        self._block_size = block_size
        self._device = cos.device
        padding = (0,) * num_padding
        self.token_ids = self._integers(batch.token_ids + padding)
        self.logit_rows = self._integers(batch.logit_rows)
        positions = self._integers(batch.positions + padding)
        self._cos = cos[positions].unsqueeze(1)  # [num_rows, 1, head_dim]
        self._sin = sin[positions].unsqueeze(1)
        self._groups: dict[int | None, tuple[AttentionGroup, ...]] = {}

    def _integers(self, values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    @cached_property
    def _places(self) -> Tensor:
        slots = self._integers(self._batch.slots)
        return ops.slot_rows(slots, self._shape.num_kv_heads, self._block_size).flatten()

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total = x if delta is None else x + delta
        return total, ops.rms_norm(total, weight, eps).to(dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return ops.silu_mul(gate_up)

    def rope_write(
        self, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cache: LayerCache
    ) -> Tensor:
        shape, num_q = self._shape, self._shape.num_heads
        heads = qkv.float().view(qkv.shape[0], -1, shape.head_dim)
        q_k, v = heads[:, : num_q + shape.num_kv_heads], heads[:, num_q + shape.num_kv_heads :]
        if q_norm is not None and k_norm is not None:
            q = ops.rms_norm(q_k[:, :num_q], q_norm, shape.eps)
            k = ops.rms_norm(q_k[:, num_q:], k_norm, shape.eps)
            q_k = torch.cat((q, k), dim=1)
        q_k = ops.rope(q_k, self._cos, self._sin)
        num_written = len(self._batch.slots)  # padding rows write nothing
        ops.write_kv(cache.k, cache.v, self._places, q_k[:num_written, num_q:], v[:num_written])
        return q_k[:, :num_q]

    def tree_attention(self, q: Tensor, cache: LayerCache, window: int | None) -> Tensor:
        groups = self._groups.get(window)
        if groups is None:
            groups = attention_groups(self._batch.segments, self._block_size, window)
            self._groups[window] = groups
        return ops.tree_attention(q, cache.k, cache.v, groups, self._shape.scale)
