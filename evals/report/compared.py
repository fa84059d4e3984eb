"""Compared: a figure of a report that two runs can be held against each other by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec.evals.report.intervals import Interval


@dataclass(frozen=True)
class Compared:
    """`of` says what of, `figure` which figure; both together are its name in two reports.

    `parts` are a numerator and a denominator per request, by sample id, whose sums make the value:
    runs over the same samples are compared sample by sample.

    Example: `Compared("suffix, chat", "tokens per step", Interval(1.37), parts={"81": (96, 70)})`.
    """

    of: str
    figure: str
    interval: Interval
    is_higher_better: bool = True
    parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """An entry of a report's list `compared`, which `specdec eval compare` reads."""
        return {
            "of": self.of,
            "figure": self.figure,
            **self.interval.as_json(),
            "is_higher_better": self.is_higher_better,
            "parts": {name: list(part) for name, part in self.parts.items()},
        }
