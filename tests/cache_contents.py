"""Contents of a KV cache of either backend: read by slot, compared whole, made NaN."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.kv_cache import KVCache
from specdec.native_cache import NativeKVCache
from specdec.target import PagedCache

_KEYS = 16  # slots of a tile in kernels/native/head_cache.hpp


def contents(kv_cache: PagedCache) -> Tensor:
    """Everything, as the cache lays it: fp32, or bytes of another precision; shares memory."""
    assert isinstance(kv_cache, KVCache | NativeKVCache)
    data = torch.as_tensor(kv_cache.data)
    is_fp32 = isinstance(kv_cache, NativeKVCache) and kv_cache.described.format == 0
    return data.view(torch.float32) if is_fp32 else data


def scales(kv_cache: PagedCache) -> Tensor:
    """Scales of an int8 cache, else nothing; shares memory."""
    return torch.as_tensor(kv_cache.scales if isinstance(kv_cache, NativeKVCache) else np.empty(0))


def by_slot(kv_cache: PagedCache, head_dim: int) -> Tensor:
    """A copy of an fp32 cache [slots, layers, 2, heads, head_dim]."""
    data = contents(kv_cache)
    assert data.dtype == torch.float32
    if isinstance(kv_cache, KVCache):
        return data.permute(2, 4, 0, 1, 3, 5).flatten(0, 1).clone()
    num_slots = kv_cache.num_blocks * kv_cache.block_size
    tiles = data.view(*data.shape[:3], num_slots // _KEYS, head_dim * _KEYS)
    keys = tiles[:, 0].unflatten(-1, (head_dim, _KEYS)).transpose(-1, -2)
    values = tiles[:, 1].unflatten(-1, (_KEYS, head_dim))
    whole = torch.stack((keys, values), 1).flatten(3, 4)  # [layers, 2, heads, slots, head_dim]
    return whole.permute(3, 0, 1, 2, 4).clone()


def poison(kv_cache: PagedCache, block_ids: Sequence[int]) -> None:
    """Make every number of blocks NaN."""
    data, ids = contents(kv_cache), list(block_ids)
    if isinstance(kv_cache, KVCache):
        data[:, :, ids] = torch.nan
    else:
        data[:, :, :, ids] = torch.nan
