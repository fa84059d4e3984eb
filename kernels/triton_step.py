"""TritonStep: the ops of one step as fused Triton kernels; the GPU's path."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels import kv_slots, norm_rope
from specdec.kernels.layer_cache import LayerCache
from specdec.kernels.step_ops import HeadShape
from specdec.kernels.step_tables import StepTables
from specdec.kernels.tree_attention import tree_attention


class TritonStep:
    """Implements StepOps over tables at fixed addresses, so that a CUDA graph can hold it.

    cos, sin: rotation tables fp32 [max_len, head_dim].
    """

    def __init__(self, tables: StepTables, shape: HeadShape, cos: Tensor, sin: Tensor) -> None:
        self.token_ids = tables.token_ids
        self.logit_rows = tables.logit_rows
        self._tables = tables
        self._shape = shape
        self._cos, self._sin = cos, sin

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if delta is None:
            return x, norm_rope.rms_norm(x, weight, eps, dtype)
        return norm_rope.add_rms_norm(x, delta, weight, eps, dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return norm_rope.silu_mul(gate_up)

    def rope_write(
        self, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cache: LayerCache
    ) -> Tensor:
        return kv_slots.rope_write(
            qkv,
            self._cos,
            self._sin,
            self._tables.tiles.positions,
            self._tables.slots,
            cache.k,
            cache.v,
            num_heads=self._shape.num_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self._shape.eps,
            k_scale=cache.k_scales,
            v_scale=cache.v_scales,
        )

    def tree_attention(self, q: Tensor, cache: LayerCache, window: int | None) -> Tensor:
        return tree_attention(
            q,
            cache.k,
            cache.v,
            self._tables.tiles,
            scale=self._shape.scale,
            window=window,
            k_scales=cache.k_scales,
            v_scales=cache.v_scales,
        )
