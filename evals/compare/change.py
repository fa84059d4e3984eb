"""Change: one figure in two runs, how many times the base it is, and whether that is sure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from specdec.evals.report.compared import Compared
from specdec.evals.report.intervals import (
    LEVEL,
    Interval,
    quotient_interval,
    quotient_of,
    swap_probability,
)

Part = tuple[float, float]


class Mark(Enum):
    """What a change is. The sign stands beside the word wherever it is shown."""

    WORSE = "worse"
    BETTER = "better"
    UNSURE = "unsure"
    SAME = "same"

    @property
    def shown(self) -> str:
        """Example: `Mark.WORSE.shown == "! worse"`."""
        return f"{_SIGNS[self]} {self.value}"


_SIGNS = {Mark.WORSE: "!", Mark.BETTER: "+", Mark.UNSURE: "?", Mark.SAME: "="}


@dataclass(frozen=True)
class Change:
    """`ratio` is the run's figure over the base's; None where one of them is not above 0.

    `num_paired` samples were held against each other one by one, and `base` and `value` are those
    samples' figures; with 0 the ratio is of the reports' figures, its bounds of their intervals.
    """

    of: str
    figure: str
    is_higher_better: bool
    base: float
    value: float
    ratio: Interval | None
    num_paired: int
    mark: Mark

    @classmethod
    def between(cls, base: Compared, other: Compared, tolerance: float) -> Change:
        """Of two runs' entries of one name. tolerance: a share; smaller changes are not marked.

        Example: `Change.between(monday, tuesday, 0.02).mark is Mark.WORSE`.
        """
        common = [name for name in base.parts if name in other.parts]
        old = _sides([base.parts[name] for name in common])
        new = _sides([other.parts[name] for name in common])
        if len(common) > 1 and sum(old[1]) > 0 and sum(new[1]) > 0:
            values, num_paired = (sum(old[0]) / sum(old[1]), sum(new[0]) / sum(new[1])), len(common)
            ratio = quotient_interval(old, new)
            # With few changed samples the interval alone would promise too much.
            is_sure = swap_probability(old, new) <= 1 - LEVEL
        else:
            values, num_paired = (base.interval.value, other.interval.value), 0
            ratio = quotient_of(base.interval, other.interval)
            is_sure = ratio is not None or _are_apart(base.interval, other.interval)
        is_up = values[1] > values[0]
        mark = Mark.BETTER if is_up == base.is_higher_better else Mark.WORSE
        if ratio is None:  # it has risen from nothing, by any share
            mark = mark if is_sure and is_up else Mark.UNSURE
        elif ratio.low is None or ratio.high is None:
            mark = Mark.UNSURE
        elif 1 - tolerance <= ratio.low and ratio.high <= 1 + tolerance:
            mark = Mark.SAME
        elif ratio.low <= 1 <= ratio.high or abs(ratio.value - 1) <= tolerance or not is_sure:
            mark = Mark.UNSURE
        return cls(base.of, base.figure, base.is_higher_better, *values, ratio, num_paired, mark)

    @property
    def basis(self) -> str:
        """What the bounds are from, in a few words."""
        if self.num_paired:
            return f"{self.num_paired} paired"
        return "intervals" if self.ratio is not None and self.ratio.low is not None else "figures"

    @property
    def named(self) -> str:
        """The figure, with its direction where that is not the usual one."""
        return self.figure if self.is_higher_better else f"{self.figure} (less is better)"

    @property
    def gain(self) -> float:
        """The ratio, turned so that more is better: it orders changes."""
        from_nothing = math.inf if self.value else 1.0
        ratio = self.value / self.base if self.base else from_nothing
        if self.is_higher_better:
            return ratio
        return 1 / ratio if ratio else math.inf

    def as_json(self) -> dict[str, Any]:
        """All fields, ready for JSON, the bounds beside the ratio."""
        ratio = self.ratio or Interval(0.0)
        return {
            **asdict(self),
            "ratio": self.ratio and ratio.value,
            "low": ratio.low,
            "high": ratio.high,
            "mark": self.mark.value,
        }


def _are_apart(base: Interval, other: Interval) -> bool:
    """Whether the other's interval begins where the base's has ended."""
    return base.high is not None and other.low is not None and base.high < other.low


def _sides(parts: list[Part]) -> tuple[list[float], list[float]]:
    return [top for top, _ in parts], [bottom for _, bottom in parts]
