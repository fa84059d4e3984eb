"""Interval: how sure a figure is, from requests that were drawn and not from steps.

Steps of one request resemble each other, so it is requests that are drawn again (cluster
bootstrap, Efron and Tibshirani 1993, 8.5 and 14.3). Of few requests, a bootstrap interval is too
short; the studentised one (bootstrap-t, 12.5) holds its promise from about ten on. Two runs over
the same requests are compared request by request, which takes out what the requests differ in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
DRAWS = 2000
EXACT = 1e-12  # a relative error below this is the computer's

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
    None where the denominators are all 0; no bounds for fewer than four requests, or where fewer
    than four differ from the rest.

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
    if error <= EXACT * abs(value):
        return Interval(value, value, value)
    drawn = np.random.default_rng(seed).integers(number, size=(draws, number))
    tops, bottoms = above[drawn], below[drawn]
    sums = bottoms.sum(axis=1)
    errors = _standard_error(tops, bottoms)
    usable = sums > 0
    if usable.sum() < draws / 2:
        return Interval(value)
    distances = tops.sum(axis=1)[usable] / sums[usable] - value
    lowest, highest = _extremes(distances, errors[usable], error)
    if not math.isfinite(highest - lowest):
        return Interval(value)
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
    low = max(0.0, middle - half) if count else 0.0
    return Interval(share, low, min(1.0, middle + half) if count < total else 1.0)


def quotient_interval(
    base: tuple[ArrayLike, ArrayLike],
    other: tuple[ArrayLike, ArrayLike],
    *,
    seed: int = 0,
    draws: int = DRAWS,
) -> Interval | None:
    """How many times `base` another run over the same requests is, with its bootstrap-t interval.

    base, other: numerators and denominators [num_requests], whose sums make each run's ratio. It is
    drawn on the logarithm's scale. None where a sum is 0, but for the other's numerators: where all
    of these are, it is 0 in every draw. No bounds where ratio_interval gives none.

    Example: `quotient_interval((tokens, steps), (new_tokens, new_steps))`.
    """
    parts = np.asarray((*base, *other), dtype=np.float64)[:, None]  # [4, draws, num_requests]
    number = parts.shape[2]
    if not _has_quotient(parts[:, 0]):
        return None
    if not parts[2].any():
        return Interval(0.0, 0.0, 0.0) if number > 1 else Interval(0.0)
    (middle,), (error,) = _log_quotient(parts)
    value = math.exp(middle)
    if number < 2:
        return Interval(value)
    if error < EXACT:
        return Interval(value, value, value)
    drawn = np.random.default_rng(seed).integers(number, size=(draws, number))
    middles, errors = _log_quotient(parts[:, 0, drawn])
    usable = np.isfinite(middles)
    if usable.sum() < draws / 2:
        return Interval(value)
    lowest, highest = _extremes(middles[usable] - middle, errors[usable], error)
    if not math.isfinite(highest - lowest):
        return Interval(value)
    return Interval(value, math.exp(middle - highest * error), math.exp(middle - lowest * error))


def swap_probability(
    base: tuple[ArrayLike, ArrayLike],
    other: tuple[ArrayLike, ArrayLike],
    *,
    seed: int = 0,
    draws: int = DRAWS,
) -> float:
    """How often two runs would differ as much as these if each request's two were alike.

    Each request's parts are swapped between the runs at random (a randomisation test: Fisher 1935).
    It is right however few requests changed, where intervals promise too much, and where one of
    the runs has nothing at all. Arguments as of `quotient_interval`; 1.0 where both have nothing.

    Example: three changed requests can come out alike by chance: it is at least 0.25.
    """
    parts = np.asarray((*base, *other), dtype=np.float64)
    sums = parts.sum(axis=1)
    if not ((sums[[1, 3]] > 0).all() and (sums[[0, 2]] >= 0).all() and sums[[0, 2]].any()):
        return 1.0
    (seen,), _ = _log_quotient(parts[:, None])
    is_swapped = np.random.default_rng(seed).random((draws, parts.shape[1])) < 0.5
    swapped = np.where(is_swapped, parts[[2, 3, 0, 1], None], parts[:, None])
    found, _ = _log_quotient(swapped)
    as_much = ~(np.abs(found) < abs(seen) - EXACT)  # what is no number counts, too
    return float((1 + as_much.sum()) / (1 + draws))


def quotient_of(base: Interval, other: Interval) -> Interval | None:
    """How many times `base` another run's figure is, of runs over different requests.

    From the intervals alone, on the logarithm's scale (MOVER: Donner and Zou 2012). None unless
    `base` is above 0 and `other` is not below; no bounds where one has none, or the base's reach 0.
    """
    if not (base.value > 0 and other.value >= 0):
        return None
    value = other.value / base.value
    if base.low is None or base.high is None or other.low is None or other.high is None:
        return Interval(value)
    if base.low <= 0:
        return Interval(value)
    down, up = math.log(base.value / base.low), math.log(base.high / base.value)
    if other.value == 0:
        return Interval(value, 0.0, other.high / base.low)
    top = math.hypot(math.log(other.high / other.value), down)
    if other.low <= 0:
        return Interval(value, 0.0, value * math.exp(top))
    bottom = math.hypot(math.log(other.value / other.low), up)
    return Interval(value, value * math.exp(-bottom), value * math.exp(top))


def _has_quotient(parts: Floats) -> bool:
    """Whether the other's ratio can be divided by the base's. parts: [4, num_requests]."""
    sums = parts.sum(axis=1)
    return bool((sums[[0, 1, 3]] > 0).all() and sums[2] >= 0)


def _extremes(distances: Floats, errors: Floats, error: float) -> tuple[float, float]:
    """Quantiles of the studentised distances of draws from the figure, whose error is `error`.

    A draw of requests that are all alike has no error to be measured by: its distance is endless,
    and so are the quantiles where such draws are not rare.
    """
    rounding = 1e-9 * error  # what is all alike differs by that
    is_alike = errors <= rounding
    endless = np.where(np.abs(distances) <= rounding, 0.0, np.copysign(np.inf, distances))
    scores = np.where(is_alike, endless, distances / np.where(is_alike, 1.0, errors))
    tail = (1 - LEVEL) / 2
    return (
        float(np.quantile(scores, tail, method="lower")),
        float(np.quantile(scores, 1 - tail, method="higher")),
    )


def _log_quotient(parts: Floats) -> tuple[Floats, Floats]:
    """Logarithm of the ratio of two ratios of sums, and its standard error by linearisation.

    parts: [4, draws, num_requests]: the base's numerators and denominators, and the other's.
    """
    number = parts.shape[2]
    sums = parts.sum(axis=2)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = parts / sums[:, :, None]
        # In this order equal runs cancel to the last bit.
        residuals = (shares[2] - shares[0]) - (shares[3] - shares[1])
        error: Floats = np.sqrt((residuals**2).sum(axis=1) * number / max(1, number - 1))
        middle: Floats = np.log(sums[2] / sums[0]) - np.log(sums[3] / sums[1])
    return middle, error


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
