"""StepTables: the integers that a step's kernels read, in one buffer of fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.attention_tiles import (
    AttentionTiles,
    TileShape,
    fill_tables,
    tile_columns,
)
from specdec.kernels.batch import Batch

# What stands in the places that a batch leaves over; 0 in tables not named.
_PADDING = {"slots": -1, "tail_rows": -1}
# Triton compiles a kernel anew for every pattern of pointers that are not 16-byte aligned.
_ALIGNMENT = 4  # in 32-bit integers


@dataclass(frozen=True)
class TableSizes:
    """Room in each table. Steps of equal sizes run the same launches on the same addresses."""

    num_rows: int
    num_tiles: int
    num_segments: int
    table_width: int  # blocks of the longest request
    num_tails: int
    num_logits: int
    shape: TileShape


class StepTables:
    """Integer tables on the device and their mirror on the host, copied in one piece.

    `load` may be called again and again: the tensors keep their addresses, so that a CUDA graph
    recorded over them replays with new content. What a batch leaves over is padding: rows that
    belong to no segment and write nothing, tiles of an empty segment.

    Example: `tables = StepTables(sizes, device); tables.load(batch); TritonStep(tables, ...)`.
    """

    def __init__(self, sizes: TableSizes, device: torch.device) -> None:
        self.sizes = sizes
        rows, segments = sizes.num_rows, sizes.num_segments
        self._shapes: dict[str, tuple[int, ...]] = {
            "ancestors": (rows, 2 * sizes.shape.words),  # first, for its 64-bit alignment
            "block_tables": (segments, sizes.table_width),
            **dict.fromkeys(("token_ids", "slots", "positions"), (rows,)),
            "logit_rows": (sizes.num_logits,),
            **dict.fromkeys(("tile_segments", "tile_rows"), (sizes.num_tiles,)),
            **dict.fromkeys(("first_rows", "num_rows", "roots"), (segments,)),
            **dict.fromkeys(("shared_lens", "num_own"), (segments,)),
            **dict.fromkeys(("tail_rows", "tail_segments"), (sizes.num_tails,)),
        }
        total = sum(_room(shape) for shape in self._shapes.values())
        is_pinned = device.type == "cuda"
        self._mirror = torch.zeros(total, dtype=torch.int32, pin_memory=is_pinned)
        self._buffer = torch.zeros(total, dtype=torch.int32, device=device)
        # Without a wait for a step's result, the mirror could change before it was copied.
        self._copied = torch.cuda.Event() if is_pinned else None
        host, on_device = self._views(self._mirror), self._views(self._buffer)
        self._block_tables = host["block_tables"]
        self._ancestors = host["ancestors"].view(torch.int64)
        self._columns = self._mirror[host["token_ids"].storage_offset() :]
        self.token_ids = on_device.pop("token_ids")
        self.slots = on_device.pop("slots")
        self.logit_rows = on_device.pop("logit_rows")
        ancestors = on_device.pop("ancestors").view(torch.int64)
        self.tiles = AttentionTiles(ancestors=ancestors, shape=sizes.shape, **on_device)

    def _views(self, buffer: Tensor) -> dict[str, Tensor]:
        views, start = {}, 0
        for name, shape in self._shapes.items():
            views[name] = buffer[start : start + torch.Size(shape).numel()].view(shape)
            start += _room(shape)
        return views

    def load(self, batch: Batch) -> None:
        """Write a batch that fits into the tables and send it to the device."""
        sizes = self.sizes
        columns = tile_columns(batch.segments, sizes.shape, num_rows=sizes.num_rows)
        # The last segment is nobody's: it has neither rows nor keys.
        assert len(columns["first_rows"]) < sizes.num_segments
        padding = {**_PADDING, "tile_segments": sizes.num_segments - 1}
        everything: list[int] = []
        for name, shape in self._shapes.items():
            if len(shape) == 1:
                values = columns[name] if name in columns else getattr(batch, name)
                assert len(values) <= shape[0], f"{name} does not fit"  # our own bug
                everything += values
                everything += [padding.get(name, 0)] * (_room(shape) - len(values))
        if self._copied is not None:
            self._copied.synchronize()  # long past, unless steps follow each other unread
        # One list and one conversion: tensors are dear to make, and the device waits for them.
        self._columns.copy_(torch.tensor(everything, dtype=torch.int32))
        self._block_tables.zero_()
        self._ancestors.zero_()
        fill_tables(batch.segments, self._block_tables, self._ancestors)
        self._buffer.copy_(self._mirror, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _room(shape: tuple[int, ...]) -> int:
    """Integers that a table takes, up to the aligned start of the next."""
    return -(-torch.Size(shape).numel() // _ALIGNMENT) * _ALIGNMENT
