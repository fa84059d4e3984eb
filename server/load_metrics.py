"""LoadMetrics: what requests experience, counted as the engine's outputs arrive."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.counters import WAIT_BOUNDS_S, Histogram
from specdec.server.messages import Output, Submit

LATELY_S = 10.0
MAX_LATELY = 2000  # samples; the newest, where more came within that time
CLIENT_GONE = 499  # nobody reads the answer

TOKEN_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LEN_BOUNDS = tuple(float(2**power) for power in range(0, 19, 2))  # tokens

Clock = Callable[[], float]  # seconds since some moment


@dataclass
class _Trip:
    """One request on its way; times are the clock's."""

    num_prompt: int
    arrived_at: float
    is_accepted: bool = False
    first_at: float = 0.0
    last_at: float = 0.0
    num_tokens: int = 0


class Recent:
    """Values of the last ten seconds, each standing for one or more observations."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float, int]] = deque(maxlen=MAX_LATELY)

    def observe(self, value: float, count: int = 1) -> None:
        """Take in a value, as if `count` times."""
        self._samples.append((self._clock(), value, count))

    def percentiles(self, *shares: float) -> list[float | None]:
        """The least value that each share of the observations does not exceed; None without any.

        Example: `recent.percentiles(0.5, 0.99)`.
        """
        since = self._clock() - LATELY_S
        samples = sorted((v, n) for at, v, n in self._samples if at > since)
        num_all = sum(count for _, count in samples)
        return [_percentile(samples, share * num_all) for share in shares]


class LoadMetrics:
    """Told when a request begins, of every output as it arrives, and when a client goes away.

    A request here is one of the engine's: an answer with n choices is n requests. Only accepted
    ones count as finished. Times run from the arrival of the HTTP request; they do not depend on
    how fast a client reads.

    A burst of k tokens t seconds after the burst before it counts as k observations of t / k in
    `inter_token_s` and as one of t in `inter_step_s`. Nothing comes before the first burst: its
    time is `first_token_s`.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.http_requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.finished: Counter[str] = Counter()  # by finish reason
        self.num_prompt = 0
        self.num_output = 0
        self.first_token_s = Histogram(WAIT_BOUNDS_S)
        self.inter_token_s = Histogram(TOKEN_BOUNDS_S)
        self.inter_step_s = Histogram(TOKEN_BOUNDS_S)
        self.per_output_token_s = Histogram(TOKEN_BOUNDS_S)
        self.end_to_end_s = Histogram(WAIT_BOUNDS_S)
        self.prompt_len = Histogram(LEN_BOUNDS)
        self.output_len = Histogram(LEN_BOUNDS)
        self.recent_first_token_s = Recent(clock)
        self.recent_inter_token_s = Recent(clock)
        self._tokens_in: deque[tuple[int, int]] = deque(maxlen=int(LATELY_S))  # by whole second
        self._trips: dict[str, _Trip] = {}
        self._clock = clock
        self._started_at = clock()

    def begin(self, requests: Iterable[Submit], arrived_at: float) -> None:
        """Requests go to the engine; `arrived_at` is of `time.perf_counter`."""
        for request in requests:
            self._trips[request.request_id] = _Trip(len(request.prompt_ids), arrived_at)

    def take(self, output: Output) -> None:
        """An output has arrived from the engine, or an error in its place."""
        trip = self._trips.get(output.request_id)
        if trip is None:
            return
        trip.is_accepted = trip.is_accepted or output.error is None
        if output.tokens:
            self._take_tokens(trip, len(output.tokens), self._clock())
        if output.finish_reason is not None:
            self._finish(output.request_id, output.finish_reason)

    def abort(self, request_id: str) -> None:
        """A request ends here because nobody waits for it any more; unknown ids are ignored."""
        self._finish(request_id, "abort")

    @property
    def num_queued(self) -> int:
        """Requests without a token yet."""
        return sum(not trip.num_tokens for trip in self._trips.values())

    @property
    def num_running(self) -> int:
        """Requests with tokens and more to come."""
        return len(self._trips) - self.num_queued

    @property
    def uptime_s(self) -> float:
        """Seconds since the server began to count."""
        return self._clock() - self._started_at

    def tokens_per_s(self) -> float:
        """Output tokens per second, over the last ten seconds or since the start."""
        now = self._clock()
        recent = sum(count for second, count in self._tokens_in if second > now - LATELY_S)
        return recent / min(LATELY_S, max(1.0, self.uptime_s))

    def _take_tokens(self, trip: _Trip, count: int, now: float) -> None:
        if not trip.num_tokens:
            trip.first_at = now
            self.num_prompt += trip.num_prompt
            self.first_token_s.observe(now - trip.arrived_at)
            self.recent_first_token_s.observe(now - trip.arrived_at)
        else:
            elapsed = now - trip.last_at
            self.inter_step_s.observe(elapsed)
            self.inter_token_s.observe(elapsed / count, count)
            self.recent_inter_token_s.observe(elapsed / count, count)
        trip.last_at = now
        trip.num_tokens += count
        self.num_output += count
        if self._tokens_in and self._tokens_in[-1][0] == int(now):
            count += self._tokens_in.pop()[1]
        self._tokens_in.append((int(now), count))

    def _finish(self, request_id: str, reason: str) -> None:
        trip = self._trips.pop(request_id, None)
        if trip is None or not trip.is_accepted:
            return
        self.finished[reason] += 1
        if reason not in ("stop", "length"):
            return
        self.end_to_end_s.observe(self._clock() - trip.arrived_at)
        self.prompt_len.observe(trip.num_prompt)
        self.output_len.observe(trip.num_tokens)
        if trip.num_tokens > 1:
            seconds = trip.last_at - trip.first_at
            self.per_output_token_s.observe(seconds / (trip.num_tokens - 1))


class CountingMiddleware:
    """Counts HTTP requests by route template and status; what has no route is `other`."""

    def __init__(self, app: ASGIApp, load: LoadMetrics) -> None:
        self.app = app
        self.load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def send_and_see(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_see)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.load.http_requests[route, status] += 1


def _percentile(samples: list[tuple[float, int]], rank: float) -> float | None:
    """The first value up to which at least `rank` observations lie."""
    num_seen = 0
    for value, count in samples:
        num_seen += count
        if num_seen >= rank:
            return value
    return None
