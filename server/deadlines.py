"""Deadlines: how long an answer may wait for the engine, for its first token, and take in all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from specdec.errors import DeadlineExceeded, Overloaded, SpecdecError
from specdec.server.settings import ServerSettings
from specdec.server.timer import Timer

Fail = Callable[[SpecdecError], object]


class Deadlines:
    """The clocks of one answer; `fail` is called when one runs out, at most once.

    Before the engine begins that is an Overloaded (503): there is too much to do, and the same
    request may be answered later. After that it is a DeadlineExceeded (504): this answer is too
    slow. Times run from `arrived_at`, of the event loop's clock.

    Example: `Deadlines(settings, loop.time(), fail=generation.fail)`; then `begin`, `first_token`
    as they happen, and `close` at the end.
    """

    def __init__(self, settings: ServerSettings, arrived_at: float, *, fail: Fail) -> None:
        self._fail = fail
        self._passed_s = asyncio.get_running_loop().time() - arrived_at
        self._queue, self._first, self._total = Timer(), Timer(), Timer()
        seconds = settings.queue_timeout_s
        busy = f"the engine was busy for {seconds:g} s; try again later"
        self._start(self._queue, seconds, Overloaded(busy))
        seconds = settings.first_token_timeout_s
        self._start(self._first, seconds, DeadlineExceeded(f"no token came within {seconds:g} s"))
        seconds = settings.total_timeout_s
        late = f"the answer was not complete after {seconds:g} s"
        self._start(self._total, seconds, DeadlineExceeded(late))

    def begin(self) -> None:
        """The engine computes it."""
        self._queue.stop()

    def first_token(self) -> None:
        """A token has come."""
        self._queue.stop()
        self._first.stop()

    def close(self) -> None:
        """It has ended; safe to call more than once."""
        for timer in (self._queue, self._first, self._total):
            timer.stop()

    def _start(self, timer: Timer, seconds: float, error: SpecdecError) -> None:
        if seconds:
            timer.start(seconds - self._passed_s, self._expire, error)

    def _expire(self, error: SpecdecError) -> None:
        self.close()
        self._fail(error)
