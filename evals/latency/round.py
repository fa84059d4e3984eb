"""Round: what one round of a latency measurement found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec.evals.latency.contender import Run
from specdec.evals.latency.read_bandwidth import Bandwidth
from specdec.evals.latency.step_clock import StepTime


@dataclass(frozen=True)
class Round:
    """Every part once. Streams in tokens per second."""

    bandwidth: Bandwidth
    steps: Mapping[tuple[int, int], Sequence[StepTime]]  # by context and rows
    one_stream: float
    many_streams: float
    answers: Mapping[str, Mapping[str, Run]]  # by sample and contender
    prefills: Mapping[str, Run]
    decode_steps: Mapping[str, Sequence[StepTime]]  # of our contenders' answers

    def as_json(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "bandwidth": asdict(self.bandwidth),
            "steps": [
                [*size, [step.as_json() for step in steps]] for size, steps in self.steps.items()
            ],
            "one_stream": self.one_stream,
            "many_streams": self.many_streams,
            "answers": {
                sample: {name: run.as_json() for name, run in runs.items()}
                for sample, runs in self.answers.items()
            },
            "prefills": {name: run.as_json() for name, run in self.prefills.items()},
            "decode_steps": {
                name: [step.as_json() for step in steps]
                for name, steps in self.decode_steps.items()
            },
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Round:
        """Example: `Round.from_json(found.as_json()) == found`."""
        return cls(
            Bandwidth(**fields["bandwidth"]),
            {
                (context, rows): [StepTime.from_json(step) for step in steps]
                for context, rows, steps in fields["steps"]
            },
            fields["one_stream"],
            fields["many_streams"],
            {
                sample: {name: Run.from_json(run) for name, run in runs.items()}
                for sample, runs in fields["answers"].items()
            },
            {name: Run.from_json(run) for name, run in fields["prefills"].items()},
            {
                name: [StepTime.from_json(step) for step in steps]
                for name, steps in fields["decode_steps"].items()
            },
        )
