"""Summary: all rounds of a latency measurement summed up, ready for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from specdec.evals.latency.answer_summary import BASELINE, AnswerSummary
from specdec.evals.latency.answers import Answers, Place
from specdec.evals.latency.asked import Asked
from specdec.evals.latency.basics import Basics
from specdec.evals.latency.contender import Run
from specdec.evals.latency.floor import Floor
from specdec.evals.latency.peak_memory import PeakMemory
from specdec.evals.latency.read_bandwidth import PASSES
from specdec.evals.latency.settings import LatencySettings
from specdec.evals.latency.step_times import StepCell
from specdec.evals.report.compared import Compared
from specdec.evals.report.intervals import Interval, ratio_interval
from specdec.evals.report.spread import ratio_of_rounds


@dataclass(frozen=True)
class Measured:
    """What rounds are of. `chosen` is what our engines run with; `asked` every prompt at every
    temperature; `best_of` names that stand for several settings of a peer."""

    target: Mapping[str, Any]
    settings: LatencySettings
    chosen: Mapping[str, Mapping[str, Any]]
    floor: Floor
    asked: Sequence[Asked]
    best_of: Mapping[str, Sequence[str]]
    memory: PeakMemory
    known_bytes: Mapping[str, int]
    num_read: int = 0  # tokens of the prompt that is only read

    def at(self, temperature: float) -> list[Asked]:
        """The prompts at a temperature."""
        return [one for one in self.asked if one.question.temperature == temperature]


def summarise(
    measured: Measured, basics: Sequence[Basics], answers: Mapping[Place, Answers]
) -> dict[str, Any]:
    """The whole report but for its origin. basics: of every round, or none."""
    settings = measured.settings
    found = [
        AnswerSummary(measured.at(temperature), answers, measured.best_of)
        for temperature in settings.temperatures
    ]
    coldest = min(found, key=lambda summary: summary.temperature)
    more = basics_summary(measured, basics) if basics else {}
    return {
        "target": dict(measured.target),
        "settings": {
            "ours": settings.sides[0].name,
            "peers": list(settings.peers),
            "best_of": {name: list(of) for name, of in measured.best_of.items()},
            "node_budget": settings.config.node_budget,
            "temperatures": list(settings.temperatures),
            "max_tokens": settings.max_tokens,
            "rounds": settings.rounds,
            "samples": len(settings.samples),
        },
        "chosen": {name: dict(chosen) for name, chosen in measured.chosen.items()},
        **more,
        "temperatures": [summary.as_json() for summary in found],
        "temperature_ratios": [
            summary.over(coldest) for summary in found if summary is not coldest
        ],
        "memory": memory_summary(measured.memory, measured.known_bytes),
        "compared": [
            *chain.from_iterable(map(_of_answers, found)),
            *_of_steps(more.get("steps", ())),
            Compared(
                BASELINE,
                "peak memory, MB",
                Interval(measured.memory.peak(BASELINE) / 1e6),
                is_higher_better=False,
            ).as_json(),
        ],
    }


def basics_summary(measured: Measured, rounds: Sequence[Basics]) -> dict[str, Any]:
    """Bandwidth, steps by size beside their floor, streams, and the prompt that is only read."""
    settings, bandwidths = measured.settings, [found.bandwidth for found in rounds]
    return {
        "bandwidth": {
            "bytes": settings.buffer_bytes,
            "passes": PASSES,
            "best": statistics.median(found.best for found in bandwidths),
            "median": statistics.median(found.median for found in bandwidths),
            "rounds": [asdict(found) for found in bandwidths],
        },
        "steps": [
            StepCell(*size, [found.steps[size] for found in rounds]).summary(
                measured.floor, bandwidths
            )
            for size in rounds[0].steps
        ],
        "streams": stream_summary(settings.num_streams, rounds),
        "prefill": prefill_summary(measured.num_read, [found.prefills for found in rounds]),
    }


def stream_summary(num_streams: int, rounds: Sequence[Basics]) -> dict[str, Any]:
    """Tokens per second of one stream and of many together, and their ratio round by round."""
    one, many = [r.one_stream for r in rounds], [r.many_streams for r in rounds]
    return {
        "num_streams": num_streams,
        "one": round(statistics.median(one), 1),
        "many": round(statistics.median(many), 1),
        "ratio": round(ratio_of_rounds(many, one), 2),
    }


def prefill_summary(num_tokens: int, rounds: Sequence[Mapping[str, Run]]) -> dict[str, Any]:
    """Seconds to the first token after a prompt nobody has seen; ratios are speeds, ours first."""
    seconds = {name: [item[name].total_s for item in rounds] for name in rounds[0]}
    return {
        "num_tokens": num_tokens,
        "seconds": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "ratios": {
            f"{BASELINE} / {name}": round(ratio_of_rounds(values, seconds[BASELINE]), 2)
            for name, values in seconds.items()
            if name != BASELINE
        },
    }


def memory_summary(memory: PeakMemory, known_bytes: Mapping[str, int]) -> dict[str, Any]:
    """High-water marks stage by stage, and what is known of one engine's: its weights and KV cache.

    `peak_bytes` is that of one engine without drafts after all its answers, `start_bytes` what the
    process had before a model was loaded. `rest_bytes` is what is in neither that nor the weights:
    as much of the KV cache as was written to, logits, code.
    """
    peak, start = memory.peak(BASELINE), memory.peak("start")
    return {
        "peak_bytes": peak,
        "start_bytes": start,
        **known_bytes,
        "rest_bytes": max(0, peak - start - known_bytes["weight_bytes"]),
        "stages": memory.stages,
    }


def _of_answers(summary: AnswerSummary) -> Iterator[dict[str, Any]]:
    """What two measurements can be held against each other by, answer by answer."""
    where = f", temperature {summary.temperature:g}" if summary.temperature else ""
    for task in dict.fromkeys(summary.tasks):
        samples = [s for s, own in zip(summary.samples, summary.tasks, strict=True) if own == task]
        for name, rounds in summary.of_task(task).items():
            answers = {
                f"{sample}, round {number}": run
                for number, found in enumerate(rounds, start=1)
                for sample, run in zip(samples, found, strict=True)
            }
            figures: dict[str, dict[str, tuple[float, float]]] = {
                "tokens/s": {key: (float(r.num_tokens), r.total_s) for key, r in answers.items()},
                "decode tokens/s": {key: r.decode for key, r in answers.items() if r.decode[1] > 0},
                "TTFT, ms": {
                    key: (1e3 * r.ttft_s, 1.0) for key, r in answers.items() if r.ttft_s is not None
                },
            }
            for figure, parts in figures.items():
                if parts:
                    yield _compared(f"{name}, {task}{where}", figure, parts)


def _of_steps(cells: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Steps of one row: the mean over rounds of their medians."""
    for cell in cells:
        if cell["rows"] == 1:
            parts = {f"round {n}": (ms, 1.0) for n, ms in enumerate(cell["rounds_ms"], start=1)}
            yield _compared(f"step of 1 row, context {cell['context']}", "step, ms", parts)


def _compared(of: str, figure: str, parts: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    interval = ratio_interval(*zip(*parts.values(), strict=True))
    assert interval is not None  # no denominator is 0
    return Compared(
        of, figure, interval, is_higher_better=not figure.endswith("ms"), parts=parts
    ).as_json()
