"""KVCache: the keys and values of all layers, addressed by slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.kernels import dispatch
from specdec.kernels.layer_cache import LayerCache
from specdec.kernels.transfer import to_device


def slot_at(table: Sequence[int], position: int, block_size: int) -> int:
    """The slot of a position, in the blocks that a request's block table orders.

    Example: `slot_at([5, 2], 17, 16) == 2 * 16 + 1`.
    """
    return table[position // block_size] * block_size + position % block_size


class KVCache:
    """Paged keys and values: slot = block_id * block_size + offset.

    `data` is [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]; index 1 is keys (0)
    or values (1). On the CPU the dtype is fp32, which holds bf16 keys exactly and keeps the
    attention's products out of low precision. In float8_e4m3fn, GPU only, every head has a scale
    of 1: keys and values of the supported models lie far within its range of 448.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim)
        if device.type == "cpu" and dtype == torch.float32:
            # numpy's zeros are mapped lazily: no start-up time for memory that is not used yet.
            self.data = torch.from_numpy(np.zeros(shape, dtype=np.float32))
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._scales: Tensor | None = None  # per layer, k or v, and head
        if dtype == torch.float8_e4m3fn:
            self._scales = torch.ones(num_layers, 2, num_kv_heads, device=device)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.data.device

    @staticmethod
    def bytes_per_block(
        num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Memory of one block over all layers, in bytes."""
        return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize

    def layer(self, index: int) -> LayerCache:
        """Keys and values of a layer."""
        k, v = self.data[index, 0], self.data[index, 1]
        if self._scales is None:
            return LayerCache(k, v)
        return LayerCache(k, v, self._scales[index, 0], self._scales[index, 1])

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy slots for all layers at once; reads everything before it writes.

        Example: `move([7, 9], [6, 7])` is safe although slot 7 is both source and destination.
        """
        if dispatch.uses_triton(self.data.device):
            from specdec.kernels.kv_slots import move_slots

            move_slots(self.data, self._slots(src), self._slots(dst))
            return
        src_blocks, src_offsets = self._locate(src)
        dst_blocks, dst_offsets = self._locate(dst)
        # The advanced indices are separated by a slice, so their axis comes first: [n, L, 2, H, D].
        self.data[:, :, dst_blocks, :, dst_offsets] = self.data[:, :, src_blocks, :, src_offsets]

    def scrub(self, block_ids: Sequence[int]) -> None:
        """Zero blocks: a NaN left behind would poison masked lanes of the next holder."""
        raw = self.data.view(torch.uint8)  # not every device can fill fp8; zero is zero bits
        raw[:, :, list(block_ids)] = 0

    def _slots(self, slots: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(slots, dtype=torch.int32), self.data.device)

    def _locate(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(slots, dtype=torch.int64, device=self.data.device)
        return index // self.block_size, index % self.block_size
