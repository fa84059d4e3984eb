"""Basics: what a round measures besides answers: bandwidth, steps, streams and a long prompt."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specdec.evals.latency.contender import Contender, Question, Run
from specdec.evals.latency.read_bandwidth import Bandwidth, ReadBandwidth
from specdec.evals.latency.settings import LatencySettings
from specdec.evals.latency.step_clock import StepTime
from specdec.evals.latency.step_times import StepBench, fitting_contexts
from specdec.evals.report.progress import Advance
from specdec.loading import LoadedModel


@dataclass(frozen=True)
class Basics:
    """Every part once. Streams in tokens per second."""

    bandwidth: Bandwidth
    steps: Mapping[tuple[int, int], Sequence[StepTime]]  # by context and rows
    one_stream: float
    many_streams: float
    prefills: Mapping[str, Run]  # by contender

    def as_json(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "bandwidth": asdict(self.bandwidth),
            "steps": [
                [*size, [step.as_json() for step in steps]] for size, steps in self.steps.items()
            ],
            "one_stream": self.one_stream,
            "many_streams": self.many_streams,
            "prefills": {name: run.as_json() for name, run in self.prefills.items()},
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Basics:
        """Example: `Basics.from_json(basics.as_json()) == basics`."""
        return cls(
            Bandwidth(**fields["bandwidth"]),
            {
                (context, rows): [StepTime.from_json(step) for step in steps]
                for context, rows, steps in fields["steps"]
            },
            fields["one_stream"],
            fields["many_streams"],
            {name: Run.from_json(run) for name, run in fields["prefills"].items()},
        )


class BasicsBench:
    """An engine for steps of every size, a buffer to be read, and who reads a long prompt.

    Example: `BasicsBench(settings, loaded, readers).basics(1, advance, repeats=4).bandwidth`.
    """

    def __init__(
        self, settings: LatencySettings, loaded: LoadedModel, readers: Mapping[str, Contender]
    ) -> None:
        self._settings, self._readers = settings, readers
        self._vocab_size = loaded.model.config.vocab_size
        self._num_read = settings.num_read(loaded.max_model_len)
        self._bandwidth = ReadBandwidth(loaded.model, num_bytes=settings.buffer_bytes)
        self._contexts = fitting_contexts(
            settings.contexts, settings.rows, settings.repeats, loaded.max_model_len
        )
        config = replace(settings.config, node_budget=max(settings.rows) - 1, prefix_cache=True)
        self._steps = StepBench(loaded, config)

    @property
    def num_items(self) -> int:
        """Calls of `advance` by `basics`."""
        return 2 + len(self._contexts) + len(self._readers)

    def basics(self, number: int, advance: Advance, *, repeats: int) -> Basics:
        """Everything once; round 0 warms up."""
        settings, where = self._settings, f"round {number}, "
        advance(f"{where}bandwidth")
        bandwidth = self._bandwidth.measure()
        steps: dict[tuple[int, int], list[StepTime]] = {}
        for context in self._contexts:
            advance(f"{where}steps at {context} tokens")
            by_rows = self._steps.steps(context, settings.rows, repeats)
            steps |= {(context, rows): times for rows, times in by_rows.items()}
        advance(f"{where}{settings.num_streams} streams")
        one_stream = self._steps.tokens_per_second(1, settings.stream_steps)
        many_streams = self._steps.tokens_per_second(settings.num_streams, settings.stream_steps)
        draw = random.Random(number).randrange
        unseen = Question(tuple(draw(self._vocab_size) for _ in range(self._num_read)), 1)
        prefills = {}
        for name, contender in self._readers.items():
            advance(f"{where}{self._num_read} tokens of prompt: {name}")
            prefills[name] = contender(unseen)
        return Basics(bandwidth, steps, one_stream, many_streams, prefills)
