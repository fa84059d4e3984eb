"""StepOps: what a target forward needs of its kernels, bound to the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels.layer_cache import LayerCache


@dataclass(frozen=True)
class HeadShape:
    """Heads of the model's attention. `scale` multiplies q k^T; `eps` is that of the head norms."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    eps: float


class StepOps(Protocol):
    """The ops of one step, done by `ReferenceStep` or `TritonStep`.

    The residual stream is fp32; what a matrix product reads is in the weights' dtype. Rows past the
    batch's own are padding: they belong to no segment, and what comes of them is not used.
    """

    @property
    def token_ids(self) -> Tensor:
        """Integers [num_rows], padding included."""

    @property
    def logit_rows(self) -> Tensor:
        """Integers [num_logits]: the rows whose logits are wanted."""

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, its RMS norm in `dtype`). x: fp32 [rows, dim]; delta: [rows, dim]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for fused [rows, 2 * dim]; returns [rows, dim]."""

    def rope_write(
        self, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cache: LayerCache
    ) -> Tensor:
        """Norm and rotate q and k, write k and v to their slots, return q.

        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim]; norms fp32 [head_dim].
        Returns [rows, num_heads, head_dim].
        """

    def tree_attention(self, q: Tensor, cache: LayerCache, window: int | None) -> Tensor:
        """Attention over the paged cache, ancestors only within a tree. Returns the shape of q."""
