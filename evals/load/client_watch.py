"""ClientWatch: whether the client itself is what is slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

TICK_S = 0.01
MAX_LAG_S = 0.01  # at p99; a token that came may have lain unread for as long
MAX_CPU_SHARE = 0.7  # of one core; above it work queues up in the client


@dataclass(frozen=True)
class ClientBusy:
    """How late the event loop was with a tick, in seconds, and the share of one core in use."""

    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    cpu_share: float

    def warning(self, late_p99_s: float) -> str | None:
        """One line if the client was late or busy, and what that means. `late_p99_s`: sending."""
        found = []
        if self.lag_p99_s > MAX_LAG_S:
            found.append(f"read up to {1e3 * self.lag_p99_s:.0f} ms late (p99)")
        if late_p99_s > MAX_LAG_S:
            found.append(f"sent {1e3 * late_p99_s:.0f} ms late (p99)")
        if self.cpu_share > MAX_CPU_SHARE:
            found.append(f"used {self.cpu_share:.0%} of a core")
        if not found:
            return None
        return (
            f"the client was a bottleneck: it {', '.join(found)}, so times are too long by as much "
            "and rates too low; run it on another machine, or ask for less"
        )


class ClientWatch:
    """Ticks while a block runs.

    Example:
        async with ClientWatch() as watch:
            await work()
        print(watch.busy().cpu_share)
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._lags_s = [0.0]
        self._wall_s = self._cpu_s = 0.0

    async def __aenter__(self) -> Self:
        self._began, self._cpu_began = self._clock(), self._cpu_clock()
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._wall_s = self._clock() - self._began
        self._cpu_s = self._cpu_clock() - self._cpu_began
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def busy(self) -> ClientBusy:
        """What was seen until the block ended."""
        p50, p99 = np.percentile(self._lags_s, (50, 99))
        share = self._cpu_s / self._wall_s if self._wall_s > 0 else 0.0
        return ClientBusy(float(p50), float(p99), max(self._lags_s), share)

    async def _tick(self) -> None:
        while True:
            due = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lags_s.append(max(0.0, self._clock() - due))
