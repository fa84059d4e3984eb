"""NativeKVCache: the keys and values of all layers, laid out for the C++ attention."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import c_int32

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.kernels.native_structs import CCache
from specdec.model_config import ModelConfig

FORMATS = {"fp32": 0, "bf16": 1, "int8": 2}  # KVFormat in kernels/native/model.hpp
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
_CACHE_LINE = 64
_SCALE_BYTES = 4  # int8: one fp32 scale per key and one per value


class NativeKVCache:
    """Paged keys and values: slot = block_id * block_size + offset.

    `data` are bytes [num_layers, 2, num_kv_heads, num_blocks, bytes of a block]; how elements lie
    in a block is the forward's business (kernels/native/head_cache.hpp). Pages, huge ones, are
    mapped when they are first used.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        config: ModelConfig,
        precision: str,
        *,
        num_blocks: int,
        block_size: int,
        mover: Callable[[CCache, Sequence[int], Sequence[int]], None],
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        heads = (config.num_layers, 2, config.num_kv_heads, num_blocks)
        per_block = block_size * config.head_dim * _ITEM_BYTES[precision]
        self.data = aligned_zeros(math.prod(heads) * per_block).reshape(*heads, per_block)
        has_scales = precision == "int8"
        self.scales = np.zeros((*heads, block_size if has_scales else 0), dtype=np.float32)
        self.described = CCache(
            data=self.data.ctypes.data,
            scales=self.scales.ctypes.data if has_scales else None,
            format=FORMATS[precision],
            num_blocks=num_blocks,
            block_size=block_size,
        )
        self._mover = mover

    @staticmethod
    def bytes_per_block(config: ModelConfig, precision: str, block_size: int) -> int:
        """Memory of one block over all layers, in bytes."""
        per_slot = config.head_dim * _ITEM_BYTES[precision]
        if precision == "int8":
            per_slot += _SCALE_BYTES
        return config.num_layers * 2 * config.num_kv_heads * block_size * per_slot

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy slots for all layers at once; reads everything before it writes."""
        self._mover(self.described, src, dst)

    def scrub(self, block_ids: Sequence[int]) -> None:
        """Zero blocks: a NaN left behind would poison masked lanes of the next holder."""
        self.data[:, :, :, list(block_ids)] = 0
        self.scales[:, :, :, list(block_ids)] = 0


def aligned_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros whose address is a multiple of a cache line, so that no vector of them spans two.

    numpy asks for huge pages where an array is large, which is worth 6 % of a step
    (docs/lab-log.md).
    """
    spacious = np.zeros(num_bytes + _CACHE_LINE, dtype=np.uint8)
    first = -spacious.ctypes.data % _CACHE_LINE
    return spacious[first : first + num_bytes]


def integers(values: Sequence[int]) -> ctypes.Array[c_int32]:
    """Integers as the C++ side reads them."""
    return (c_int32 * len(values))(*values)
