"""Entries to compare: figures of runs that are so many times one another."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.evals.compare.change import Change
from specdec.evals.report.compared import Compared
from specdec.evals.report.intervals import Interval, ratio_interval

Parts = Mapping[str, tuple[float, float]]


def entry(
    of: str = "suffix",
    figure: str = "tokens per step",
    parts: Parts | None = None,
    interval: Interval | None = None,
    is_higher_better: bool = True,
) -> Compared:
    found = interval
    if found is None and parts:
        found = ratio_interval(*zip(*parts.values(), strict=True))
    return Compared(of, figure, found or Interval(1.5), is_higher_better, parts or {})


def scaled(scale: float = 1.0, number: int = 20) -> Parts:
    """Requests of different lengths and acceptance, all of which are so many times the base's."""
    return {str(n): (scale * (60 + 7 * n % 90), 40 + 3 * n % 17) for n in range(number)}


def between(base: Compared, other: Compared, tolerance: float = 0.02) -> Change:
    return Change.between(base, other, tolerance)
