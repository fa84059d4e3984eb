"""Loops: send the requests of a level, as waiting clients do or by a schedule."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from specdec.evals.client.exchange import Exchange
from specdec.evals.load.arrivals import Schedule
from specdec.evals.load.client_watch import ClientWatch
from specdec.evals.load.extent import Extent
from specdec.evals.load.level import Level
from specdec.evals.load.load_run import LoadRun, Sent

MAX_ERRORS = 20  # in a row; a server that fails so often will not recover within the level
PAUSE_S = 0.1  # of a client that was refused: it would only ask the same again

Send = Callable[[int], Awaitable[Exchange]]  # of the index-th request
Clock = Callable[[], float]


async def run_level(
    level: Level,
    send: Send,
    extent: Extent,
    *,
    burstiness: float = 1.0,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> LoadRun:
    """Put one level of load on a server until all counted requests have ended.

    Example: `await run_level(Level(concurrency=8), send, Extent(requests=64))`.
    """
    loop: _Loop
    if level.concurrency is not None:
        loop = ClosedLoop(level.concurrency, send, extent, clock)
    else:
        assert level.rate is not None, "a level is of one kind or the other"
        loop = OpenLoop(Schedule.draw(level.rate, burstiness, seed, extent), send, clock)
    async with ClientWatch(clock) as watch:
        await loop.run()
    sent = sorted(loop.sent, key=lambda one: one.index)
    ends = [one.end_at for one in sent if one.is_counted] or [one.end_at for one in sent]
    end_at = max(ends, default=loop.begin_at or 0.0)
    begin_at = end_at if loop.begin_at is None else min(loop.begin_at, end_at)
    return LoadRun(level, tuple(sent), begin_at, end_at, watch.busy(), loop.stopped)


class _Loop(ABC):
    """What both have: all that was sent, and when to give up."""

    def __init__(self, send: Send, clock: Clock) -> None:
        self.sent: list[Sent] = []
        self.begin_at: float | None = None  # when the warm-up was over
        self.stopped = ""
        self._send, self._clock = send, clock
        self._num_errors = 0  # in a row

    @abstractmethod
    async def run(self) -> None:
        """Until the last answer has ended."""

    async def _one(self, index: int, due_at: float, is_counted: bool) -> Exchange:
        exchange = await self._send(index)
        self.sent.append(Sent(index, due_at, exchange, is_counted))
        self._num_errors = self._num_errors + 1 if exchange.outcome == "error" else 0
        if self._num_errors >= MAX_ERRORS:
            self.stopped = self.stopped or (
                f"given up after {MAX_ERRORS} errors in a row; the last: {exchange.error}"
            )
        return exchange


class ClosedLoop(_Loop):
    """Clients that send their next request as soon as the last has been answered.

    They go on until every counted request has ended, so that the last of them meet the same load
    as the first; what they send meanwhile is not counted.
    """

    def __init__(self, concurrency: int, send: Send, extent: Extent, clock: Clock) -> None:
        super().__init__(send, clock)
        self._concurrency, self._extent = concurrency, extent
        self._num_sent = self._num_counted = self._num_open = 0
        self._answered: set[int] = set()  # clients that have had an answer

    async def run(self) -> None:
        """Until the last answer has ended."""
        await asyncio.gather(*map(self._client, range(self._concurrency)))

    async def _client(self, number: int) -> None:
        due_at = self._clock()
        while not self._is_over():
            index, is_counted = self._num_sent, self._counts()
            self._num_sent += 1
            self._num_counted += is_counted
            self._num_open += is_counted
            exchange = await self._one(index, due_at, is_counted)
            self._has_answered(number)
            self._num_open -= is_counted
            due_at = self._clock()
            if exchange.outcome != "ok" and not self._is_over():
                await asyncio.sleep(PAUSE_S)
                due_at = self._clock()

    def _counts(self) -> bool:
        """Whether the request that is sent now is counted."""
        warmup = self._extent.warmup
        if self.begin_at is None and warmup is not None and self._num_sent >= warmup:
            self.begin_at = self._clock()
        return self.begin_at is not None and not self._is_full()

    def _has_answered(self, number: int) -> None:
        """Counting begins with the end of an answer, as it ends: between a first token and an end
        there are more tokens than the time has room for.
        """
        self._answered.add(number)
        is_all = len(self._answered) == self._concurrency
        if is_all and self.begin_at is None and self._extent.warmup is None:
            self.begin_at = self._clock()

    def _is_full(self) -> bool:
        """Whether all requests that are to be counted have been sent."""
        if self._extent.requests is not None:
            return self._num_counted >= self._extent.requests
        assert self.begin_at is not None, "counting has begun"
        end_at = self.begin_at + (self._extent.duration_s or 0.0)
        return self._num_counted > 0 and self._clock() >= end_at

    def _is_over(self) -> bool:
        if self.stopped:
            return True
        return self.begin_at is not None and self._is_full() and not self._num_open


class OpenLoop(_Loop):
    """Requests that are sent when they are due, however many are not answered yet.

    A client that falls behind sends at once what is overdue: the schedule never waits for it, and
    how late it was is in each request's `late_s` (what coordinated omission would hide).
    """

    def __init__(self, schedule: Schedule, send: Send, clock: Clock) -> None:
        super().__init__(send, clock)
        self._schedule = schedule

    async def run(self) -> None:
        """Until the last answer has ended."""
        start = self._clock()
        self.begin_at = start + self._schedule.begin
        num_warmup = len(self._schedule.warmup)
        tasks = []
        for index, at in enumerate((*self._schedule.warmup, *self._schedule.counted)):
            await asyncio.sleep(max(0.0, start + at - self._clock()))
            if self.stopped:
                break
            answer = self._one(index, start + at, index >= num_warmup)
            tasks.append(asyncio.create_task(answer))
        await asyncio.gather(*tasks)
