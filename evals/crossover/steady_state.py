"""SteadyState: the time in which so many streams are answered, and what arrives within it.

It begins when as many answers have ended as there are streams, and ends when `num_requests` have,
some times as many; until then a stream that ends is followed by the tasks over again, so that the
number of streams never falls. A run down to the last stream would mix all smaller concurrencies
into the figure, and by other shares on every side; a time that closes with the first stream that
has no successor would leave most of the answers out. Streams that keep step are in the same phase
at both ends, so as many prompts are read as answers given, as it is with streams that do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.errors import SpecdecError
from specdec.evals.crossover.loop_run import LoopRun, LoopStep


class SteadyState:
    """Is told of every request in the order in which things happen; requests have numbers from 0.

    Arrivals at the very moment at which it begins are not of it: they belong to the step before.

    Example:
        state = SteadyState(num_streams=8, num_requests=24)
        number = state.begin()
        state.note(number, num_tokens=2, now=0.5, is_last=True)
    """

    def __init__(self, num_streams: int, num_requests: int) -> None:
        assert num_requests >= 2 * num_streams, "something must follow the first answers"
        self._num_streams, self._num_requests = num_streams, num_requests
        self._num_left = num_requests
        self._num_begun = self._num_ended = 0
        self._begin_at = self._end_at = 0.0
        self._num_tokens = 0

    @property
    def is_steady(self) -> bool:
        """Whether it has begun and not ended."""
        return self._num_streams <= self._num_ended < self._num_requests

    @property
    def is_over(self) -> bool:
        """Whether the first `num_requests` have ended, which may be later than as many have."""
        return not self._num_left

    def begin(self) -> int:
        """The next request's number."""
        self._num_begun += 1
        return self._num_begun - 1

    def note(self, number: int, num_tokens: int, now: float, *, is_last: bool) -> None:
        """Tokens of a request have arrived, perhaps its last ones."""
        is_within = self.is_steady or now == self._end_at
        if is_within and now > self._begin_at:
            self._num_tokens += num_tokens
        if not is_last:
            return
        self._num_ended += 1
        self._num_left -= number < self._num_requests
        if self._num_ended == self._num_streams:
            self._begin_at = now
        if self._num_ended == self._num_requests:
            self._end_at = now

    def run(
        self, answers: Sequence[tuple[int, ...] | None], steps: Sequence[LoopStep] = ()
    ) -> LoopRun:
        """What arrived, once it is over; answers: of the first requests, None if not told.

        Raises SpecdecError if no time was left to count in.
        """
        assert self.is_over, "requests are still to end"
        seconds = self._end_at - self._begin_at
        if seconds <= 0:
            raise SpecdecError("all answers ended at one moment: allow more tokens")
        return LoopRun(self._num_tokens, seconds, tuple(answers), tuple(steps))
