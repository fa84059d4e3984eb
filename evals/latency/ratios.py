"""Ratios: speeds of contenders over each other, prompt by prompt, then by task and over all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.evals.latency.contender import Run
from specdec.evals.report.intervals import Interval, mean_interval
from specdec.evals.report.spread import ratio_of_rounds

NOTHING_KNOWN = math.log(1e6)  # a bound that says no more than that speeds are above 0
Runs = Mapping[str, Sequence[Sequence[Run]]]  # by contender, round and prompt


@dataclass(frozen=True)
class Speeds:
    """Tokens per second of contenders, round by round.

    `of` has a list of rounds for each prompt of each contender; `tasks` are the prompts'. `best`
    names, for names that stand for several settings, the fastest of them on each prompt.
    """

    of: Mapping[str, Sequence[Sequence[float]]]
    tasks: Sequence[str]
    best: Mapping[str, Sequence[str]]

    @classmethod
    def of_runs(
        cls,
        runs: Runs,
        tasks: Sequence[str],
        best_of: Mapping[str, Sequence[str]],
        *,
        is_decode: bool = False,
    ) -> Speeds:
        """End to end, prompt included; or what comes after the first arrival.

        Prompts of a contender that does not tell when tokens come have no decode speed: such a
        contender is left out. `best_of` has the settings that a name stands for; those that did
        not run are left out.
        """
        found = {}
        for name, rounds in runs.items():
            speeds = [
                [_speed(run, is_decode) for run in prompt] for prompt in zip(*rounds, strict=True)
            ]
            known = [[speed for speed in prompt if speed] for prompt in speeds]
            if known == speeds:
                found[name] = known
        best = {}
        for name, settings in best_of.items():
            ran = [setting for setting in settings if setting in found]
            if ran:
                best[name] = [
                    max(ran, key=lambda setting: statistics.median(found[setting][index]))
                    for index in range(len(tasks))
                ]
        chosen = {
            name: [found[setting][index] for index, setting in enumerate(settings)]
            for name, settings in best.items()
        }
        return cls({**found, **chosen}, tuple(tasks), best)

    def medians(self, name: str) -> list[float]:
        """Of the rounds of each prompt."""
        return [statistics.median(rounds) for rounds in self.of[name]]

    def over(self, side: str, other: str, base: Speeds | None = None) -> list[float]:
        """A contender's speed over another's on each prompt: the median of each round's ratio.

        The other may be of another measurement over the same prompts and rounds, `base`.
        """
        others = (base or self).of[other]
        return [ratio_of_rounds(*pair) for pair in zip(self.of[side], others, strict=True)]


def by_task(values: Sequence[float], tasks: Sequence[str]) -> dict[str, float]:
    """The median over each task's prompts.

    Example: `by_task([1.0, 3.0, 5.0], ["a", "b", "b"]) == {"a": 1.0, "b": 4.0}`.
    """
    return {
        task: statistics.median(v for v, own in zip(values, tasks, strict=True) if own == task)
        for task in dict.fromkeys(tasks)
    }


def geometric_mean(values: Sequence[float]) -> Interval:
    """Over prompts, with its bootstrap-t interval on the logarithm's scale.

    No bounds where `mean_interval` gives none, or where they are endless.

    Example: `geometric_mean([1.0, 4.0]).value == 2.0`.
    """
    found = mean_interval([math.log(value) for value in values])
    assert found is not None  # there is a prompt
    middle, low, high = found.value, found.low, found.high
    if low is None or high is None or max(-low, high) > NOTHING_KNOWN:
        return Interval(math.exp(middle))
    return Interval(math.exp(middle), math.exp(low), math.exp(high))


def ratio_summary(values: Sequence[float], tasks: Sequence[str]) -> dict[str, Any]:
    """Medians by task and the geometric mean of ratios that prompts have; ready for JSON."""
    return {
        "tasks": {task: round(value, 3) for task, value in by_task(values, tasks).items()},
        "all": rounded(geometric_mean(values)),
    }


def rounded(interval: Interval) -> dict[str, float | None]:
    """An interval for JSON, to the digits that mean something."""
    return {
        name: None if bound is None else round(bound, 3)
        for name, bound in interval.as_json().items()
    }


def _speed(run: Run, is_decode: bool) -> float:
    if not is_decode:
        return run.tokens_per_second
    number, seconds = run.decode
    return number / seconds if seconds > 0 else 0.0
