"""KernelTimer: seconds per launch, by CUDA events or the host's clock, and a device's ceilings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

REPEATS = 5
MAX_LAUNCHES = 200  # in one graph, unless a case has more input sets
REPLAY_SECONDS = 0.02  # of back-to-back replays per repeat: the host's share vanishes in it


class Timer(Protocol):
    """Median seconds of a call."""

    @property
    def cache_bytes(self) -> int:
        """Bytes that the device's last cache holds: inputs must exceed it to come from memory."""

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """One call's, when the calls run in turn."""

    def replay_seconds(self, call: Callable[[], object]) -> float:
        """That of a call which replays a CUDA graph, or must not be recorded for other reasons."""


class CudaTimer:
    """Records the calls in a CUDA graph, so that no launch waits for the host, and replays it."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.cache_bytes = int(getattr(properties, "L2_cache_size", 0)) or 64 * 2**20

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """See Timer."""
        # Kernels are compiled before the capture, which does not allow it.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        eager = self._elapsed(calls[0], 1)
        wanted = min(MAX_LAUNCHES, max(1, int(REPLAY_SECONDS / 4 / eager)))
        rounds = -(-wanted // len(calls))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        return self.replay_seconds(graph.replay) / (rounds * len(calls))

    def replay_seconds(self, call: Callable[[], object]) -> float:
        """See Timer."""
        call()
        once = self._elapsed(call, 1)
        count = min(100, max(1, int(REPLAY_SECONDS / once)))
        return statistics.median(self._elapsed(call, count) for _ in range(REPEATS))

    def _elapsed(self, call: Callable[[], object], count: int) -> float:
        """Seconds per call of `count` in a row."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count


@dataclass(frozen=True)
class HostTimer:
    """Calls and looks at the clock, for the CPU; begins no repeat after `most_seconds`."""

    cache_bytes: int = 16 * 2**20
    most_seconds: float = 0.5

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """See Timer."""
        found = [self._elapsed(calls)]
        while len(found) < REPEATS and sum(found) < self.most_seconds:
            found.append(self._elapsed(calls))
        return statistics.median(found) / len(calls)

    def replay_seconds(self, call: Callable[[], object]) -> float:
        """See Timer."""
        return self.seconds([call])

    def _elapsed(self, calls: Sequence[Callable[[], object]]) -> float:
        started = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - started


@dataclass(frozen=True)
class Ceilings:
    """What a device does at best: bytes per second of a copy, flops per second of a product."""

    copy_rate: float
    gemm_rate: float

    def floor(self, num_bytes: int, num_flops: int) -> float:
        """Seconds that this much work takes at least."""
        return max(num_bytes / self.copy_rate, num_flops / self.gemm_rate)


def measure_ceilings(
    timer: Timer, device: torch.device, *, copied_bytes: int, gemm_size: int, dtype: torch.dtype
) -> Ceilings:
    """Copy `copied_bytes` (read and written: twice that) and multiply square matrices, measured."""
    return Ceilings(
        2 * copied_bytes / _copy_seconds(timer, device, copied_bytes),
        2 * gemm_size**3 / _gemm_seconds(timer, device, gemm_size, dtype),
    )


def _copy_seconds(timer: Timer, device: torch.device, copied_bytes: int) -> float:
    source = torch.rand(copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    return timer.seconds([lambda: target.copy_(source)])


def _gemm_seconds(timer: Timer, device: torch.device, size: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return timer.seconds([lambda: torch.mm(a, b, out=out)])
