"""KVCache: the keys and values of all layers, addressed by slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def slot_at(table: Sequence[int], position: int, block_size: int) -> int:
    """The slot of a position, in the blocks that a request's block table orders.

    Example: `slot_at([5, 2], 17, 16) == 2 * 16 + 1`.
    """
    return table[position // block_size] * block_size + position % block_size


class KVCache:
    """Paged keys and values: slot = block_id * block_size + offset.

    `data` is [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]; index 1 is keys (0)
    or values (1). On the CPU the dtype is fp32, which holds bf16 keys exactly and keeps the
    attention's products out of low precision.
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

    @staticmethod
    def bytes_per_block(
        num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Memory of one block over all layers, in bytes."""
        return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.data[index, 0], self.data[index, 1]

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy slots for all layers at once; reads everything before it writes.

        Example: `move([7, 9], [6, 7])` is safe although slot 7 is both source and destination.
        """
        src_blocks, src_offsets = self._locate(src)
        dst_blocks, dst_offsets = self._locate(dst)
        # The advanced indices are separated by a slice, so their axis comes first: [n, L, 2, H, D].
        self.data[:, :, dst_blocks, :, dst_offsets] = self.data[:, :, src_blocks, :, src_offsets]

    def scrub(self, block_ids: Sequence[int]) -> None:
        """Zero blocks: a NaN left behind would poison masked lanes of the next holder."""
        self.data[:, :, list(block_ids)] = 0

    def _locate(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(slots, dtype=torch.int64, device=self.data.device)
        return index // self.block_size, index % self.block_size
