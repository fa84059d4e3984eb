"""Admission: how many requests may wait for their first token, and when to ask again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from specdec.errors import Overloaded

LATELY_S = 30.0  # what left the queue within that time tells how fast it drains
MAX_LEFT = 1024  # departures remembered
MAX_RETRY_AFTER_S = 30


class Admission:
    """The queue's bounds: requests without a token yet, and the tokens of their prompts.

    A request here is one choice of an answer; choices of one prompt share its tokens. What comes
    to an empty queue is always let in: a bound below one answer's size refuses none for ever.

    Example:
        place = admission.enter(num_requests=2)   # before tokenising; raises Overloaded
        place.hold(2, [900])                      # one prompt, two choices; raises Overloaded
        place.leave_one(prompt=0)                 # a first token has come
        place.leave()                             # all of it has ended
    """

    def __init__(
        self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._max_requests = max_requests or math.inf
        self._max_tokens = max_tokens or math.inf
        self._clock = clock
        self._left: deque[tuple[float, int, int]] = deque(maxlen=MAX_LEFT)  # when, how much
        self._filled_at = 0.0  # when the queue was last empty

    def enter(self, num_requests: int) -> Place:
        """Let an answer in whose prompts are not known yet, or raise Overloaded."""
        place = Place(self)
        place.hold(num_requests, ())
        return place

    def grow(self, num_requests: int, num_tokens: int, *, num_own: int) -> None:
        """Let a place that holds `num_own` requests hold more, or raise Overloaded."""
        excess = self.num_requests + num_requests - self._max_requests
        if num_requests and excess > 0 and self.num_requests > num_own:
            raise self._overloaded("requests", self.num_requests, excess, 1)
        excess = self.num_tokens + num_tokens - self._max_tokens
        if num_tokens and excess > 0 and self.num_tokens:
            raise self._overloaded("prompt tokens", self.num_tokens, excess, 2)
        if not self.num_requests:
            self._filled_at = self._clock()
        self.num_requests += num_requests
        self.num_tokens += num_tokens

    def release(self, num_requests: int, num_tokens: int) -> None:
        """Give room back."""
        self.num_requests -= num_requests
        self.num_tokens -= num_tokens
        self._left.append((self._clock(), num_requests, num_tokens))

    def _overloaded(self, what: str, count: int, excess: float, column: int) -> Overloaded:
        seconds = self._retry_after_s(excess, column)
        return Overloaded(
            f"the queue is full: {count} {what} wait; try again in {seconds} s",
            retry_after_s=seconds,
        )

    def _retry_after_s(self, excess: float, column: int) -> int:
        """Seconds until that much has left the queue, if it goes on draining as it lately did."""
        now = self._clock()
        since = max(self._filled_at, now - LATELY_S)
        drained = sum(entry[column] for entry in self._left if entry[0] >= since)
        # One more than has left: a queue that has only just filled up is not a stuck one.
        seconds = math.ceil(excess * (now - since) / (drained + 1))
        return min(MAX_RETRY_AFTER_S, max(1, seconds))


class Place:
    """One answer's place in the queue; `leave` gives up whatever it still holds."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_requests = 0
        self._tokens_of: dict[int, int] = {}  # by prompt

    def hold(self, num_requests: int, prompt_lens: Sequence[int]) -> None:
        """At least so many requests, and prompts of these lengths; raises Overloaded."""
        more = max(0, num_requests - self._num_requests)
        self._admission.grow(more, sum(prompt_lens), num_own=self._num_requests)
        self._num_requests += more
        self._tokens_of = dict(enumerate(prompt_lens))

    def leave_one(self, prompt: int) -> None:
        """A request has its first token: it no longer waits, and its prompt has been computed."""
        if self._num_requests:
            self._num_requests -= 1
            self._admission.release(1, self._tokens_of.pop(prompt, 0))

    def leave(self) -> None:
        """Nothing of it waits any more; safe to call more than once."""
        num_tokens = sum(self._tokens_of.values())
        if self._num_requests or num_tokens:
            self._admission.release(self._num_requests, num_tokens)
        self._num_requests = 0
        self._tokens_of.clear()
