"""StepTables: the integers that a step's kernels read, in one buffer of fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.attention_tiles import AttentionTiles, TileShape, make_tiles
from specdec.kernels.batch import Batch

_CPU = torch.device("cpu")


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
            "token_ids": (rows,),
            "slots": (rows,),
            "positions": (rows,),
            "logit_rows": (sizes.num_logits,),
            "tile_segments": (sizes.num_tiles,),
            "tile_rows": (sizes.num_tiles,),
            "first_rows": (segments,),
            "num_rows": (segments,),
            "roots": (segments,),
            "shared_lens": (segments,),
            "num_own": (segments,),
            "block_tables": (segments, sizes.table_width),
            "tail_rows": (sizes.num_tails,),
            "tail_segments": (sizes.num_tails,),
        }
        total = sum(torch.Size(shape).numel() for shape in self._shapes.values())
        is_pinned = device.type == "cuda"
        self._mirror = torch.zeros(total, dtype=torch.int32, pin_memory=is_pinned)
        self._buffer = torch.zeros(total, dtype=torch.int32, device=device)
        self._host, on_device = self._views(self._mirror), self._views(self._buffer)
        self.token_ids = on_device.pop("token_ids")
        self.slots = on_device.pop("slots")
        self.logit_rows = on_device.pop("logit_rows")
        ancestors = on_device.pop("ancestors").view(torch.int64)
        self.tiles = AttentionTiles(ancestors=ancestors, shape=sizes.shape, **on_device)

    def _views(self, buffer: Tensor) -> dict[str, Tensor]:
        views, start = {}, 0
        for name, shape in self._shapes.items():
            end = start + torch.Size(shape).numel()
            views[name] = buffer[start:end].view(shape)
            start = end
        return views

    def load(self, batch: Batch) -> None:
        """Write a batch that fits into the tables and send it to the device."""
        sizes, host = self.sizes, self._host
        tiles = make_tiles(batch.segments, sizes.shape, num_rows=sizes.num_rows, device=_CPU)
        self._mirror.zero_()
        # The last segment is nobody's: it has neither rows nor keys.
        assert len(tiles.first_rows) < sizes.num_segments
        host["tile_segments"].fill_(sizes.num_segments - 1)
        host["tail_rows"].fill_(-1)
        host["slots"].fill_(-1)
        for name in ("token_ids", "slots", "logit_rows"):
            _fill(host[name], torch.tensor(getattr(batch, name), dtype=torch.int32))
        for name in host.keys() - {"token_ids", "slots", "logit_rows", "ancestors"}:
            _fill(host[name], getattr(tiles, name))
        _fill(host["ancestors"], tiles.ancestors.view(torch.int32))
        self._buffer.copy_(self._mirror, non_blocking=True)


def _fill(room: Tensor, values: Tensor) -> None:
    """Write to the first places of a table; a batch that does not fit is our own bug."""
    assert all(n <= most for n, most in zip(values.shape, room.shape, strict=True))
    room[tuple(slice(n) for n in values.shape)] = values
