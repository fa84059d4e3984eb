"""StepClock: what each part of an engine's steps takes, by a clock around it and none within."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.engine import Engine
from specdec.request import RequestOutput
from specdec.server.engine_process import tokens_message
from specdec.server.framing import encode_frame

PARTS = ("plan", "draft", "pack", "forward", "verify", "commit")


@dataclass(frozen=True)
class StepTime:
    """One step. Times in seconds; `deliver_s`, encoding what it brought, comes after the step."""

    total_s: float
    parts: Mapping[str, float]
    deliver_s: float
    num_rows: int
    is_decode: bool  # without a prefill chunk

    @property
    def rest_s(self) -> float:
        """What no part accounts for: budgets, drafters' news, outputs."""
        return self.total_s - sum(self.parts.values())

    def as_json(self) -> list[Any]:
        """Ready for JSON, short: there are thousands of them."""
        parts = [self.parts[part] for part in PARTS]
        return [self.total_s, parts, self.deliver_s, self.num_rows, self.is_decode]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> StepTime:
        """Example: `StepTime.from_json(step.as_json()) == step`."""
        total_s, parts, *rest = fields
        return cls(total_s, dict(zip(PARTS, parts, strict=True)), *rest)


class StepClock:
    """Times every step of an engine from now on; each part costs it about a microsecond.

    Example: `clock = StepClock(engine); generate(engine, ids, params); clock.steps[-1].total_s`.
    """

    def __init__(self, engine: Engine) -> None:
        self.steps: list[StepTime] = []
        self._spent: dict[str, float] = {}
        self._given: dict[str, Any] = {}  # what each part returned in this step
        owners = (
            *(engine.scheduler, engine.drafter, engine.runner, engine.runner),
            *(engine._verifier, engine._committer),  # clocks are no reason to make them public
        )
        for owner, part in zip(owners, PARTS, strict=True):
            setattr(owner, part, self._timed(part, getattr(owner, part)))
        self._step = engine.step
        engine.step = self._timed_step  # type: ignore[method-assign]  # to see what the engine does

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            given = call(*arguments)
            self._spent[part] = time.perf_counter() - started
            self._given[part] = given
            return given

        return timed

    def _timed_step(self) -> list[RequestOutput]:
        self._spent, self._given = {}, {}
        started = time.perf_counter()
        outputs = self._step()
        ended = time.perf_counter()
        if "pack" in self._given:
            deliver(outputs)
            self.steps.append(
                StepTime(
                    ended - started,
                    self._spent,
                    time.perf_counter() - ended,
                    self._given["pack"].num_rows,
                    not self._given["plan"].prefill_chunks,
                )
            )
        self._given = {}  # logits are large
        return outputs


def deliver(outputs: Sequence[RequestOutput]) -> bytes:
    """The message that the engine process sends for a step's outputs."""
    return encode_frame(tokens_message(outputs))


def breakdown(steps: Sequence[StepTime]) -> dict[str, float]:
    """Medians over steps, in ms: each part, the rest, the step, and its delivery; {} of no step.

    `rows` is the mean number of a step's rows.
    """
    if not steps:
        return {}
    columns = {
        **{part: [step.parts[part] for step in steps] for part in PARTS},
        "rest": [step.rest_s for step in steps],
        "step": [step.total_s for step in steps],
        "deliver": [step.deliver_s for step in steps],
    }
    medians = {name: round(1e3 * statistics.median(times), 4) for name, times in columns.items()}
    rows = round(statistics.mean(step.num_rows for step in steps), 2)
    return {**medians, "rows": rows, "steps": len(steps)}
