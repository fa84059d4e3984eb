"""AnswerSummary: what all rounds found of answers at one temperature, ready for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from specdec.evals.latency.answers import Answers, Place
from specdec.evals.latency.asked import Asked
from specdec.evals.latency.contender import Run, num_equal
from specdec.evals.latency.ratios import Runs, Speeds, geometric_mean, ratio_summary, rounded
from specdec.evals.latency.side import OURS, PLAIN
from specdec.evals.latency.step_clock import breakdown
from specdec.evals.report.spread import spread_ms

BASELINE = PLAIN.name


class AnswerSummary:
    """The answers to all prompts at one temperature.

    asked: the prompts at this temperature. answers: of every round. best_of: names that stand for
    several settings of a peer.

    Example: `AnswerSummary(asked, answers, best_of).as_json()["speeds"]`.
    """

    def __init__(
        self,
        asked: Sequence[Asked],
        answers: Mapping[Place, Answers],
        best_of: Mapping[str, Sequence[str]],
    ) -> None:
        self._asked = asked
        self.temperature = asked[0].question.temperature
        rounds = sorted({place.round for place in answers})
        self._answers = [
            [answers[Place(number, self.temperature, one.sample.sample_id)] for one in asked]
            for number in rounds
        ]
        self.runs: Runs = {
            name: [[found.runs[name] for found in of_round] for of_round in self._answers]
            for name in self._answers[0][0].runs
        }
        self.samples = [one.sample.sample_id for one in asked]
        self.tasks = [one.sample.task for one in asked]
        self.speeds = Speeds.of_runs(self.runs, self.tasks, best_of)
        self.decode_speeds = Speeds.of_runs(self.runs, self.tasks, best_of, is_decode=True)

    def as_json(self) -> dict[str, Any]:
        """Medians by task, geometric means over all prompts, ratios, times, and every prompt."""
        of, tasks = self.speeds.of, self.tasks
        own = [name for name in self.runs if name.startswith(OURS)]
        others = [name for name in of if not name.startswith(OURS)]
        pairs = [(name, BASELINE) for name in own if name != BASELINE]
        pairs += [(name, other) for other in others for name in own]
        steps = [found.decode_steps for found in chain.from_iterable(self._answers)]
        return {
            "temperature": self.temperature,
            "speeds": {name: ratio_summary(self.speeds.medians(name), tasks) for name in of},
            "ratios": {
                f"{side} / {other}": ratio_summary(self.speeds.over(side, other), tasks)
                for side, other in pairs
            },
            "tasks": {task: self._task(task) for task in dict.fromkeys(tasks)},
            "contenders": {name: time_summary(rounds) for name, rounds in self.runs.items()},
            "breakdown": {
                name: breakdown(list(chain.from_iterable(found[name] for found in steps)))
                for name in own
            },
            "prompts": {
                one.sample.sample_id: self._prompt(index) for index, one in enumerate(self._asked)
            },
        }

    def of_task(self, task: str) -> Runs:
        """The answers to a task's prompts."""
        return {
            name: [
                [run for run, own in zip(found, self.tasks, strict=True) if own == task]
                for found in rounds
            ]
            for name, rounds in self.runs.items()
        }

    def over(self, base: AnswerSummary) -> dict[str, Any]:
        """The speed of each contender over its own at another temperature, which has it too."""
        found = {}
        for name in self.speeds.of:
            if name in base.speeds.of:
                decode = None
                if name in self.decode_speeds.of and name in base.decode_speeds.of:
                    values = self.decode_speeds.over(name, name, base.decode_speeds)
                    decode = rounded(geometric_mean(values))
                values = self.speeds.over(name, name, base.speeds)
                found[name] = {**ratio_summary(values, self.tasks), "decode": decode}
        return {"temperature": self.temperature, "over": base.temperature, "contenders": found}

    def _task(self, task: str) -> dict[str, Any]:
        """`num_equal` counts tokens before an answer parts from ours without drafts."""
        runs = self.of_task(task)
        lengths = [run.num_tokens for run in runs[BASELINE][0]]
        speeds = {
            name: [
                speed
                for speed, own in zip(self.speeds.medians(name), self.tasks, strict=True)
                if own == task
            ]
            for name in runs
        }
        return {
            "num_prompts": len(lengths),
            "num_tokens": sum(lengths),
            "mean_tokens": round(statistics.mean(lengths), 1),
            "min_tokens": min(lengths),
            "contenders": {
                name: {
                    "tokens_per_second": round(statistics.median(speeds[name]), 1),
                    "min": round(min(speeds[name]), 1),
                    "max": round(max(speeds[name]), 1),
                    "tokens_per_step": _tokens_per_step(rounds[0]),
                    "num_equal": _num_equal(rounds[0], runs[BASELINE][0]),
                    **time_summary(rounds),
                }
                for name, rounds in runs.items()
            },
        }

    def _prompt(self, index: int) -> dict[str, Any]:
        question = self._asked[index].question
        return {
            "task": self.tasks[index],
            "prompt_tokens": len(question.prompt_ids),
            "num_tokens": question.num_tokens,
            "tokens_per_second": {
                name: round(self.speeds.medians(name)[index], 1) for name in self.speeds.of
            },
            "best": {name: settings[index] for name, settings in self.speeds.best.items()},
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
