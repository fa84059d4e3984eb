"""LayerCache: the keys and values of one layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerCache:
    """Keys and values [num_blocks, num_kv_heads, block_size, head_dim], in any float dtype.

    In float8_e4m3fn they are stored divided by `k_scales`, `v_scales`, fp32 [num_kv_heads].
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
