"""ShadowQueue: answered requests that wait to be run again, within bounds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from specdec.params import SamplingParams
from specdec.request import FinishReason
from specdec.server.messages import Submit

MAX_WAITING = 256  # requests
MAX_WAITING_TOKENS = 262_144  # that they hold, about 10 MB


@dataclass(frozen=True)
class Answered:
    """A request that ended with stop or length: what it was computed from, and what came.

    `name` is how its client knows it, `params.seed` the one that the engine used.
    """

    name: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str
    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_tries: int = 0

    @property
    def num_tokens(self) -> int:
        """Token ids that it holds, those of its parameters too."""
        params = self.params
        num_listed = len(params.logit_bias) + len(params.allowed_token_ids or ())
        num_listed += sum(map(len, params.bad_words))
        return len(self.prompt_ids) + len(self.output_ids) + num_listed

    @property
    def is_likeliest(self) -> bool:
        """Whether every token was the one that the target itself thought the likeliest."""
        params = self.params
        unchanged = replace(
            params,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            logit_bias={},
            bad_words=(),
            allowed_token_ids=None,
            min_tokens=0,
        )
        return params.is_greedy and params == unchanged

    def again(self, request_id: str) -> Submit:
        """The same request without speculation, to be run as a shadow.

        Where that is what chooses tokens, it asks for the two likeliest of each place.
        """
        logprobs = 2 if self.is_likeliest else None
        return Submit(
            request_id,
            self.prompt_ids,
            replace(self.params, logprobs=logprobs),
            cache_salt=self.cache_salt,
            is_shadow=True,
        )


class ShadowQueue:
    """First come, first served; where it is full the oldest make room.

    Example:
        queue = ShadowQueue(max_requests=2)
        num_dropped = queue.add(answered)
        queue.take()
    """

    def __init__(
        self, max_requests: int = MAX_WAITING, max_tokens: int = MAX_WAITING_TOKENS
    ) -> None:
        self.num_tokens = 0
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._waiting: deque[Answered] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, answered: Answered) -> int:
        """Let a request wait behind all others; returns how many were dropped, it included.

        One that is too large by itself is dropped alone.
        """
        if answered.num_tokens > self._max_tokens:
            return 1
        self._waiting.append(answered)
        self.num_tokens += answered.num_tokens
        num_dropped = 0
        while len(self._waiting) > self._max_requests or self.num_tokens > self._max_tokens:
            self.take()
            num_dropped += 1
        return num_dropped

    def take(self) -> Answered:
        """The one that has waited longest; IndexError where none waits."""
        answered = self._waiting.popleft()
        self.num_tokens -= answered.num_tokens
        return answered

    def clear(self) -> int:
        """Drop all; returns how many."""
        num_dropped = len(self._waiting)
        self._waiting.clear()
        self.num_tokens = 0
        return num_dropped
