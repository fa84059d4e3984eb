"""ReadBandwidth: bytes per second that memory gives to the forward, right now."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.builtin_model import cache_folder
from specdec.kernels import native_library
from specdec.native_model import NativeModel
from specdec.target import Target

BUFFER_BYTES = 512 * 2**20  # far more than a last-level cache holds
PASSES = 5

Read = Callable[[Tensor], float]


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of the best and of the median pass."""

    best: float
    median: float


class ReadBandwidth:
    """Reads one large buffer again and again.

    `read` makes one pass over a tensor and returns its seconds; by default the native library
    with the model's threads, or a sum by PyTorch, on its device, for a model that PyTorch computes.

    Example: `ReadBandwidth(model).measure().best / 1e9` are GB/s.
    """

    def __init__(
        self, model: Target, *, num_bytes: int = BUFFER_BYTES, read: Read | None = None
    ) -> None:
        self.num_threads = (
            model.num_threads if isinstance(model, NativeModel) else torch.get_num_threads()
        )
        self._read = read or (
            _native_read(model) if isinstance(model, NativeModel) else _read_by_torch
        )
        # Written, because pages that never were are all the same page of zeros.
        self._buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=model.device)

    def measure(self, passes: int = PASSES) -> Bandwidth:
        """A few passes now; memory of a shared machine may be half as fast a minute later."""
        num_bytes = self._buffer.numel() * self._buffer.element_size()
        seconds = [self._read(self._buffer) for _ in range(passes)]
        return Bandwidth(num_bytes / min(seconds), num_bytes / statistics.median(seconds))


def _native_read(model: NativeModel) -> Read:
    library = native_library.load(cache_folder() / "native")

    def read(buffer: Tensor) -> float:
        num_bytes = buffer.numel() * buffer.element_size()
        seconds: float = library.specdec_read(buffer.data_ptr(), num_bytes, model.num_threads)
        return seconds

    return read


def _read_by_torch(buffer: Tensor) -> float:
    started = time.perf_counter()
    buffer.sum().item()  # which waits for a GPU
    return time.perf_counter() - started
