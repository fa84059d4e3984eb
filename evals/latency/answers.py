"""Answers: what everybody answered to one prompt at one temperature in one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.evals.latency.contender import Run
from specdec.evals.latency.step_clock import StepTime


@dataclass(frozen=True)
class Place:
    """Where answers stand in a measurement.

    Example: `Place(1, 0.8, "chat: sea").key == "round 1, temperature 0.8, chat: sea"`.
    """

    round: int
    temperature: float
    sample_id: str

    @property
    def key(self) -> str:
        """Its name in a journal."""
        return f"round {self.round}, temperature {self.temperature:g}, {self.sample_id}"


@dataclass(frozen=True)
class Answers:
    """Runs by contender, and the decode steps of our own."""

    runs: Mapping[str, Run]
    decode_steps: Mapping[str, Sequence[StepTime]]

    def as_json(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "runs": {name: run.as_json() for name, run in self.runs.items()},
            "decode_steps": {
                name: [step.as_json() for step in steps]
                for name, steps in self.decode_steps.items()
            },
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Answers:
        """Example: `Answers.from_json(answers.as_json()) == answers`."""
        return cls(
            {name: Run.from_json(run) for name, run in fields["runs"].items()},
            {
                name: [StepTime.from_json(step) for step in steps]
                for name, steps in fields["decode_steps"].items()
            },
        )
