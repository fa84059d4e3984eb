"""Contender: one way to answer a prompt with so many tokens, ours or a peer's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.evals.client.exchange import Arrival, Exchange
from specdec.evals.data.sample import Message
from specdec.generation import generate
from specdec.params import SamplingParams
from specdec.request import TokenRecord


@dataclass(frozen=True)
class Question:
    """A prompt to be answered with exactly `num_tokens`; an end token is one like any other.

    `messages` are the chat that the prompt was made of, if it was one.
    """

    prompt_ids: tuple[int, ...]
    num_tokens: int
    temperature: float = 0.0
    seed: int = 0
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Run:
    """One answer. `total_s` are the seconds from submission to its end, prompt included.

    `arrivals` are the steps that brought tokens, timed from the submission. `token_ids` are None
    where they are not told, then `num_told` is their number. `num_prefix_hit` tokens of the prompt
    were found in a cache.

    Example: `Run((5, 6, 7), 0.4, (Arrival(0.1, 1), Arrival(0.4, 2))).token_times_s()` is two times
    0.15.
    """

    token_ids: tuple[int, ...] | None
    total_s: float
    arrivals: tuple[Arrival, ...] = ()
    num_told: int = 0
    num_prefix_hit: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_told if self.token_ids is None else len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.total_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None where nobody noted when tokens came."""
        return self.arrivals[0].at_s if self.arrivals else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens by the steps that brought them, the first included."""
        counts = [arrival.num_tokens for arrival in self.arrivals]
        return None if not counts or None in counts else self.num_tokens / len(counts)

    @property
    def decode(self) -> tuple[int, float]:
        """Tokens that came after the first arrival, and the seconds that they took."""
        if not self.arrivals:
            return 0, 0.0
        first, last = self.arrivals[0], self.arrivals[-1]
        return self.num_tokens - (first.num_tokens or 1), last.at_s - first.at_s

    def step_times_s(self) -> list[float]:
        """Seconds between successive arrivals."""
        return [after.at_s - before.at_s for before, after in pairwise(self.arrivals)]

    def token_times_s(self) -> list[float]:
        """One per token after the first arrival: a step's time over the tokens that it brought.

        None at all where it is not known how many came when.
        """
        return Exchange(0.0, self.total_s, "ok", arrivals=self.arrivals).itls_s() or []

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "token_ids": None if self.token_ids is None else list(self.token_ids),
            "total_s": self.total_s,
            "arrivals": [[arrival.at_s, arrival.num_tokens] for arrival in self.arrivals],
            "num_told": self.num_told,
            "num_prefix_hit": self.num_prefix_hit,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Run:
        """Example: `Run.from_json(run.as_json()) == run`."""
        token_ids = fields["token_ids"]
        return cls(
            None if token_ids is None else tuple(token_ids),
            fields["total_s"],
            tuple(Arrival(*arrival) for arrival in fields["arrivals"]),
            fields["num_told"],
            fields["num_prefix_hit"],
        )


Contender = Callable[[Question], Run]


class Stopwatch:
    """Notes when tokens come.

    Example: `watch = Stopwatch(); watch.note(step=1, num_tokens=2); watch.run(token_ids)`.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._times: dict[object, float] = {}
        self._counts: Counter[object] = Counter()

    def note(self, step: object, num_tokens: int = 1) -> None:
        """Tokens came now; those of one `step` arrive with its last one."""
        self._times[step] = time.perf_counter() - self._started
        self._counts[step] += num_tokens

    def run(self, token_ids: Sequence[int]) -> Run:
        """The answer ends now."""
        total_s = time.perf_counter() - self._started
        arrivals = (Arrival(at_s, self._counts[step]) for step, at_s in self._times.items())
        return Run(tuple(token_ids), total_s, tuple(arrivals))


def ours(engine: Engine) -> Contender:
    """An engine as a contender."""

    def run(question: Question) -> Run:
        params = SamplingParams(
            max_tokens=question.num_tokens,
            ignore_eos=True,
            temperature=question.temperature,
            seed=question.seed,
        )
        times: list[float] = []

        def note(text: str, token: TokenRecord | None) -> None:
            if token is not None:
                times.append(time.perf_counter() - started)

        started = time.perf_counter()
        result = generate(engine, question.prompt_ids, params, keeps_steps=True, on_delta=note)
        total_s = time.perf_counter() - started
        arrivals, num_come = [], 0
        for step in result.steps:
            num_come += step.num_tokens
            arrivals.append(Arrival(times[num_come - 1], step.num_tokens))
        return Run(result.token_ids, total_s, tuple(arrivals), num_prefix_hit=result.num_prefix_hit)

    return run


def checked(name: str, contender: Contender) -> Contender:
    """The contender, held to its promise: SpecdecError for another number of tokens."""

    def run(question: Question) -> Run:
        result = contender(question)
        if result.num_tokens != question.num_tokens:
            raise SpecdecError(
                f"{name} answered with {result.num_tokens} tokens instead of "
                f"{question.num_tokens}: it cannot be compared"
            )
        return result

    return run


def num_equal(token_ids: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first difference; other sums in other precisions part sooner or later."""
    pairs = enumerate(zip(token_ids, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(token_ids), len(other)))
