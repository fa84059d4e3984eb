"""Spread: the percentiles of a few timings, and the ratio of two sides that were timed in turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

PERCENTS = (50, 90, 99)


def percentile(values: Sequence[float], percent: int) -> float:
    """The least value that at least `percent` of the values do not exceed (nearest rank).

    Example: `percentile([3.0, 1.0, 2.0], 50) == 2.0`.
    """
    return sorted(values)[max(1, math.ceil(percent * len(values) / 100)) - 1]


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds at each of PERCENTS; of few timings p99 is the longest."""
    return {f"p{percent}": round(1e3 * percentile(seconds, percent), 3) for percent in PERCENTS}


def ratio_of_rounds(side: Sequence[float], other: Sequence[float]) -> float:
    """Median over rounds of that round's `side / other`: what drifts between rounds cancels."""
    return statistics.median(a / b for a, b in zip(side, other, strict=True))
