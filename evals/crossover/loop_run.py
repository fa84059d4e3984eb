"""LoopRun: the steady state of one closed loop, and what is kept of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from specdec.evals.latency.contender import num_equal


@dataclass(frozen=True)
class LoopStep:
    """One step. `seconds` run from the end of the step before, so admitting requests counts."""

    seconds: float
    num_tokens: int
    num_rows: int
    num_prefill: int  # of the rows
    num_requests: int  # with a decode step
    num_nodes: int
    reason: str = ""  # the controller's; "" of a step without a decode
    decide_s: float = 0.0


@dataclass(frozen=True)
class LoopRun:
    """Tokens of all streams together and the seconds in which they came, prompts included.

    `answers` are those of the counted requests in order, None where a server does not tell them;
    `steps` those of an engine of ours.
    """

    num_tokens: int
    seconds: float
    answers: tuple[tuple[int, ...] | None, ...]
    steps: tuple[LoopStep, ...] = ()


@dataclass(frozen=True)
class StepTotals:
    """Sums over an engine's steps. `decode` are tokens and seconds of those without a prefill
    chunk, `reasons` how many steps had which reason of the controller's.

    Example: `StepTotals.of(run.steps).tokens_per_step`.
    """

    num_steps: int
    num_tokens: int
    num_rows: int
    num_requests: int
    num_nodes: int
    decide_s: float
    decode: tuple[int, float]
    reasons: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Sequence[LoopStep]) -> Self:
        """Sum up."""
        decode = [step for step in steps if not step.num_prefill]
        return cls(
            len(steps),
            sum(step.num_tokens for step in steps),
            sum(step.num_rows for step in steps),
            sum(step.num_requests for step in steps),
            sum(step.num_nodes for step in steps),
            sum(step.decide_s for step in steps),
            (sum(step.num_tokens for step in decode), sum(step.seconds for step in decode)),
            dict(Counter(step.reason for step in steps if step.reason)),
        )

    @property
    def rows_per_step(self) -> float:
        """Prefill chunks included."""
        return self.num_rows / self.num_steps

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request gets of a step with a part for it."""
        return self.num_tokens / max(1, self.num_requests)

    @property
    def nodes_per_request(self) -> float:
        """Draft nodes verified for a request in a step with a part for it."""
        return self.num_nodes / max(1, self.num_requests)


@dataclass(frozen=True)
class CellRun:
    """What is kept of a run. `parted` are the answers that are not plain decoding's: the task, and
    the tokens before they part; None where no answer was told.

    Example: `CellRun.from_json(run.as_json()) == run`.
    """

    num_tokens: int
    seconds: float
    parted: tuple[tuple[int, int], ...] | None
    steps: StepTotals | None = None

    @classmethod
    def of(cls, run: LoopRun, expected: Sequence[Sequence[int]]) -> Self:
        """expected: each task's answer; tasks were taken in order and over again."""
        parted = []
        for number, answer in enumerate(run.answers):
            task = number % len(expected)
            if answer is not None and tuple(answer) != tuple(expected[task]):
                parted.append((task, num_equal(answer, expected[task])))
        is_told = None not in run.answers
        steps = StepTotals.of(run.steps) if run.steps else None
        return cls(run.num_tokens, run.seconds, tuple(parted) if is_told else None, steps)

    @property
    def tokens_per_second(self) -> float:
        """Of all streams together."""
        return self.num_tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Over the steps without a prefill chunk; None if all had one, or none is known."""
        if self.steps is None or not self.steps.decode[1]:
            return None
        num_tokens, seconds = self.steps.decode
        return num_tokens / seconds

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Of what `as_json` gave, read back."""
        steps, parted = fields["steps"], fields["parted"]
        if steps is not None:
            steps = StepTotals(**{**steps, "decode": tuple(steps["decode"])})
        return cls(
            fields["num_tokens"],
            fields["seconds"],
            None if parted is None else tuple((task, number) for task, number in parted),
            steps,
        )
