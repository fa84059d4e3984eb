"""Interval: how sure a figure is, from requests that were drawn and not from steps.

Steps of one request resemble each other, so it is requests that are drawn again (cluster
bootstrap, Efron and Tibshirani 1993, 8.5 and 14.3). Of few requests, a bootstrap interval is too
short; the studentised one (bootstrap-t, 12.5) holds its promise from about ten on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
DRAWS = 2000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure with the bounds between which the true one lies at LEVEL; None of too little."""

    value: float
    low: float | None = None
    high: float | None = None

    def as_json(self) -> dict[str, float | None]:
        """Example: `{"value": 1.52, "low": 1.41, "high": 1.66}`."""
        return {"value": self.value, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_interval(
    numerators: ArrayLike, denominators: ArrayLike, *, seed: int = 0, draws: int = DRAWS
) -> Interval | None:
    """The ratio of two sums over requests, and its bootstrap-t interval.

    numerators, denominators: [num_requests]. With denominators of 1 it is the mean over requests.
    None where the denominators are all 0; no bounds for fewer than two requests.

    Example: `ratio_interval(tokens, steps)` are tokens per step, weighted by tokens.
    """
    above = np.asarray(numerators, dtype=np.float64)
    below = np.asarray(denominators, dtype=np.float64)
    if not below.sum() > 0:
        return None
    value = float(above.sum() / below.sum())
    number = len(above)
    error = _standard_error(above[None], below[None])[0]
    if number < 2:
        return Interval(value)
    if not error > 0:
        return Interval(value, value, value)
    drawn = np.random.default_rng(seed).integers(number, size=(draws, number))
    tops, bottoms = above[drawn], below[drawn]
    sums = bottoms.sum(axis=1)
    errors = _standard_error(tops, bottoms)
    usable = (sums > 0) & (errors > 0)
    if usable.sum() < draws / 2:  # of a few different requests, most draws are all alike
        return Interval(value)
    ratios = tops.sum(axis=1)[usable] / sums[usable]
    scores = (ratios - value) / errors[usable]
    tail = (1 - LEVEL) / 2
    lowest, highest = np.quantile(scores, [tail, 1 - tail])
    return Interval(value, float(value - highest * error), float(value - lowest * error))


def mean_interval(values: Sequence[float], *, seed: int = 0) -> Interval | None:
    """The mean over requests; None of none."""
    return ratio_interval(values, np.ones(len(values)), seed=seed)


def proportion_interval(count: int, total: int) -> Interval | None:
    """A share of independent trials (Wilson 1927); None of no trial.

    Example: `proportion_interval(0, 1000).high` is 0.0038: no fault seen, few can be there.
    """
    if not total:
        return None
    z = 1.959963984540054  # of LEVEL
    share = count / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2) / (1 + z * z / total)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def _standard_error(tops: Floats, bottoms: Floats) -> Floats:
    """Of the ratio of sums, by linearisation (the delta method).

    tops, bottoms: [draws, num_requests].
    """
    number = tops.shape[1]
    sums = bottoms.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        residuals = tops - tops.sum(axis=1, keepdims=True) / sums * bottoms
        error: Floats = np.sqrt((residuals**2).sum(axis=1) * number / max(1, number - 1))
        error /= sums[:, 0]
    return error
