"""Summary: all rounds of a latency measurement summed up, ready for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from specdec.evals.latency.contender import Run, num_equal
from specdec.evals.latency.floor import Floor
from specdec.evals.latency.peak_memory import PeakMemory
from specdec.evals.latency.read_bandwidth import PASSES
from specdec.evals.latency.round import Round
from specdec.evals.latency.settings import LatencySettings
from specdec.evals.latency.side import OURS, PLAIN
from specdec.evals.latency.step_clock import breakdown
from specdec.evals.latency.step_times import StepCell
from specdec.evals.report.compared import Compared
from specdec.evals.report.intervals import Interval, ratio_interval
from specdec.evals.report.spread import ratio_of_rounds, spread_ms

BASELINE = PLAIN.name

Runs = Mapping[str, Sequence[Sequence[Run]]]  # by contender, round and sample


@dataclass(frozen=True)
class Measured:
    """What rounds are of. `samples` are the tasks of the samples; `best_of` names that stand for
    several settings of a peer."""

    target: Mapping[str, Any]
    settings: LatencySettings
    floor: Floor
    samples: Mapping[str, str]
    prefill_len: int
    best_of: Mapping[str, Sequence[str]]
    memory: PeakMemory
    known_bytes: Mapping[str, int]

    def of_task(self, task: str) -> list[str]:
        """Its samples."""
        return [sample for sample, own in self.samples.items() if own == task]


def runs_of(rounds: Sequence[Round], samples: Sequence[str]) -> Runs:
    """The answers to these samples."""
    return {
        name: [[found.answers[sample][name] for sample in samples] for found in rounds]
        for name in rounds[0].answers[samples[0]]
    }


def summarise(measured: Measured, rounds: Sequence[Round]) -> dict[str, Any]:
    """The whole report but for its origin."""
    settings = measured.settings
    bandwidths = [found.bandwidth for found in rounds]
    cells = [
        StepCell(*size, [found.steps[size] for found in rounds]).summary(measured.floor, bandwidths)
        for size in rounds[0].steps
    ]
    tasks = {task: measured.of_task(task) for task in dict.fromkeys(measured.samples.values())}
    return {
        "target": dict(measured.target),
        "settings": {
            "peers": list(settings.peers),
            "node_budget": settings.config.node_budget,
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "rounds": len(rounds),
            "samples": len(measured.samples),
        },
        "bandwidth": {
            "bytes": settings.buffer_bytes,
            "passes": PASSES,
            "best": statistics.median(found.best for found in bandwidths),
            "median": statistics.median(found.median for found in bandwidths),
            "rounds": [asdict(found) for found in bandwidths],
        },
        "steps": cells,
        "breakdown": {
            name: breakdown(list(chain.from_iterable(r.decode_steps[name] for r in rounds)))
            for name in rounds[0].decode_steps
        },
        "streams": stream_summary(settings.num_streams, rounds),
        "prefill": prefill_summary(measured.prefill_len, [found.prefills for found in rounds]),
        "prompts": {
            task: answer_summary(runs_of(rounds, samples), measured.best_of)
            for task, samples in tasks.items()
        },
        "contenders": {
            name: time_summary(by_round)
            for name, by_round in runs_of(rounds, list(measured.samples)).items()
        },
        "memory": memory_summary(measured.memory, measured.known_bytes),
        "compared": [
            *chain.from_iterable(_of_answers(rounds, *task) for task in tasks.items()),
            *_of_steps(cells),
            Compared(
                BASELINE,
                "peak memory, MB",
                Interval(measured.memory.peak(BASELINE) / 1e6),
                is_higher_better=False,
            ).as_json(),
        ],
    }


def stream_summary(num_streams: int, rounds: Sequence[Round]) -> dict[str, Any]:
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


def answer_summary(runs: Runs, best_of: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Medians, spreads and ratios of the answers to one task's prompts.

    A speed is all tokens of a round by all their seconds, and a ratio the median over rounds of
    that round's ratio of speeds. `num_equal` counts tokens before an answer parts from ours without
    drafts. `best` names the fastest of a peer's settings here; ratios are to it as well.
    """
    speeds = {
        name: [sum(r.num_tokens for r in found) / sum(r.total_s for r in found) for found in rounds]
        for name, rounds in runs.items()
    }
    best = {
        name: max(settings, key=lambda setting: statistics.median(speeds[setting]))
        for name, settings in best_of.items()
    }
    own = [name for name in runs if name.startswith(OURS)]
    others = [*(name for name in runs if not name.startswith(OURS)), *best]
    pairs = [(name, BASELINE) for name in own if name != BASELINE]
    pairs += [(name, other) for other in others for name in own]
    of = speeds | {name: speeds[setting] for name, setting in best.items()}
    return {
        "num_prompts": len(runs[BASELINE][0]),
        "num_tokens": sum(run.num_tokens for run in runs[BASELINE][0]),
        "contenders": {
            name: {
                "tokens_per_second": round(statistics.median(values), 1),
                "min": round(min(values), 1),
                "max": round(max(values), 1),
                "tokens_per_step": _tokens_per_step(runs[name][0]),
                "num_equal": _num_equal(runs[name][0], runs[BASELINE][0]),
                **time_summary(runs[name]),
                "seconds": [round(sum(r.total_s for r in found), 5) for found in runs[name]],
            }
            for name, values in speeds.items()
        },
        "best": best,
        "ratios": {
            f"{side} / {other}": round(ratio_of_rounds(of[side], of[other]), 2)
            for side, other in pairs
        },
    }


def time_summary(rounds: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """Percentiles in ms, and tokens per second after the first; None where nothing is known.

    `step_ms` are times between arrivals, `token_ms` one per token: a step's time over the tokens
    that it brought.
    """
    runs = list(chain.from_iterable(rounds))
    decoded = [[run.decode for run in found] for found in rounds]
    speeds = [
        sum(number for number, _ in found) / seconds
        for found in decoded
        if (seconds := sum(seconds for _, seconds in found)) > 0
    ]
    return {
        "ttft_ms": _spread([run.ttft_s for run in runs if run.ttft_s is not None]),
        "step_ms": _spread([seconds for run in runs for seconds in run.step_times_s()]),
        "token_ms": _spread([seconds for run in runs for seconds in run.token_times_s()]),
        "decode_tokens_per_second": round(statistics.median(speeds), 1) if speeds else None,
        "num_prefix_hit": sum(run.num_prefix_hit for run in runs),
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


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    return spread_ms(seconds) if seconds else None


def _tokens_per_step(runs: Sequence[Run]) -> float | None:
    if any(run.tokens_per_step is None for run in runs):
        return None
    return round(sum(r.num_tokens for r in runs) / sum(len(r.arrivals) for r in runs), 2)


def _num_equal(runs: Sequence[Run], others: Sequence[Run]) -> int | None:
    pairs = [(run.token_ids, other.token_ids) for run, other in zip(runs, others, strict=True)]
    if any(ids is None or other is None for ids, other in pairs):
        return None
    return sum(num_equal(ids or (), other or ()) for ids, other in pairs)


def _of_answers(
    rounds: Sequence[Round], task: str, samples: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """What two measurements can be held against each other by, answer by answer."""
    for name, by_round in runs_of(rounds, samples).items():
        answers = {
            f"{sample}, round {number}": run
            for number, found in enumerate(by_round, start=1)
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
                yield _compared(f"{name}, {task}", figure, parts)


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
