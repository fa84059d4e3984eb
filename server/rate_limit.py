"""Rate limit: so many requests per minute of each API key, or of each address without keys."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.server.caller import caller_in
from specdec.server.json_response import error_response
from specdec.server.responses import HttpError

MAX_CALLERS = 10_000  # remembered at once: 2 MB


class RateLimit:
    """A token bucket per caller: `per_minute` requests at once, and as many per minute after that.

    Of more than MAX_CALLERS callers the one that has been silent longest is forgotten.

    Example: `RateLimit(60).take("somebody")` is 0.0: the request may come in.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_minute / 60
        self._room = max(1.0, per_minute)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # level, its time

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, name: str) -> float:
        """Count a request; 0.0, or the seconds until one of this caller may come in."""
        now = self._clock()
        level, then = self._buckets.pop(name, (self._room, now))
        level = min(self._room, level + (now - then) * self._per_s)
        is_allowed = level >= 1
        self._buckets[name] = (level - is_allowed, now)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if is_allowed else (1 - level) / self._per_s


class RateLimitMiddleware:
    """Counts POST requests, which are those that cost; answers 429 to those above the limit."""

    def __init__(self, app: ASGIApp, per_minute: float) -> None:
        self.app = app
        self._limit = RateLimit(per_minute) if per_minute else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._limit is None or scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        wait_s = self._limit.take(caller_in(scope).name)
        if not wait_s:
            await self.app(scope, receive, send)
            return
        seconds = math.ceil(wait_s)
        error = HttpError(
            429,
            f"too many requests; try again in {seconds} s",
            "rate_limit_error",
            code="rate_limit_exceeded",
        )
        await error_response(error, {"Retry-After": str(seconds)})(scope, receive, send)
