"""Intervals: 95 % of them hold the truth, over populations as requests have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from specdec.evals.report.intervals import (
    Interval,
    mean_interval,
    proportion_interval,
    quotient_interval,
    quotient_of,
    ratio_interval,
    swap_probability,
)

Floats = NDArray[Any]
Draw = Callable[[np.random.Generator, int], tuple[Floats, Floats]]  # tokens and steps of requests
Estimate = Callable[[Floats, Floats, int], Interval | None]  # of them, with a seed
RUNS = 1000


def steady(rng: np.random.Generator, number: int) -> tuple[Floats, Floats]:
    """Beta-binomial acceptance, chains of four."""
    steps = rng.integers(20, 100, number)
    return 1.0 * steps + rng.binomial(4 * steps, rng.beta(2, 3, number)), 1.0 * steps


def skewed(rng: np.random.Generator, number: int) -> tuple[Floats, Floats]:
    """Most requests accept little and some nearly all; some are long."""
    steps = np.ceil(rng.lognormal(3.5, 0.5, number)).astype(int)
    return 1.0 * steps + rng.binomial(4 * steps, rng.beta(0.6, 2.4, number)), 1.0 * steps


def of_tasks(rng: np.random.Generator, number: int) -> tuple[Floats, Floats]:
    """Six tasks of different acceptance; equal answers, so that steps follow from it."""
    share = rng.beta(8, 8 * np.array([1, 2, 4, 6, 10, 20])[rng.integers(0, 6, number)])
    tokens = np.full(number, 128.0)
    return tokens, np.ceil(tokens / (1 + 4 * share))


def covered(
    draw: Draw,
    number: int,
    interval: Callable[[Floats, Floats, int], Interval | None],
    truth: float,
) -> float:
    """In which share of RUNS the truth lies in the interval."""
    rng = np.random.default_rng(2026)
    num_held = 0
    for seed in range(RUNS):
        found = interval(*draw(rng, number), seed)
        assert found is not None and found.low is not None and found.high is not None
        assert found.low <= found.value <= found.high
        num_held += found.low <= truth <= found.high
    return num_held / RUNS


@pytest.mark.parametrize("number", [10, 20, 60])
@pytest.mark.parametrize("draw", [steady, skewed, of_tasks])
def test_95_percent_of_ratio_intervals_hold_the_truth(draw: Draw, number: int) -> None:
    tokens, steps = draw(np.random.default_rng(1), 1_000_000)
    truth = tokens.sum() / steps.sum()
    share = covered(draw, number, lambda a, b, s: ratio_interval(a, b, seed=s), truth)
    assert 0.93 <= share <= 0.97


@pytest.mark.parametrize(("draw", "number"), [(steady, 10), (of_tasks, 20), (skewed, 60)])
def test_95_percent_of_mean_intervals_hold_the_truth(draw: Draw, number: int) -> None:
    tokens, steps = draw(np.random.default_rng(1), 1_000_000)
    truth = float((tokens / steps).mean())
    share = covered(draw, number, lambda a, b, s: mean_interval(list(a / b), seed=s), truth)
    assert 0.93 <= share <= 0.97


def test_95_percent_of_quotient_intervals_hold_the_truth() -> None:
    """Of runs over the same requests and equal answers, the second of which needs fewer steps."""

    def pair(rng: np.random.Generator, number: int) -> tuple[Floats, Floats]:
        share = rng.beta(2, 6, number) * rng.lognormal(0, 0.2, (2, number))
        return np.full(number, 128.0), 128 / (1 + share * np.array([[4], [5]]))

    def interval(tokens: Floats, steps: Floats, seed: int) -> Interval | None:
        return quotient_interval((tokens, steps[0]), (tokens, steps[1]), seed=seed)

    _, (base, other) = pair(np.random.default_rng(1), 1_000_000)
    assert 0.93 <= covered(pair, 20, interval, base.sum() / other.sum()) <= 0.97


def test_intervals_of_runs_over_other_requests_are_combined() -> None:
    def pair(rng: np.random.Generator, number: int) -> tuple[Floats, Floats]:
        both = [steady(rng, number) for _ in range(2)]
        return np.stack([a for a, _ in both]), np.stack([b for _, b in both])

    def interval(tokens: Floats, steps: Floats, seed: int) -> Interval | None:
        base, other = (ratio_interval(tokens[i], steps[i], seed=seed) for i in range(2))
        assert base is not None and other is not None
        return quotient_of(base, other)

    assert 0.93 <= covered(pair, 20, interval, 1.0) <= 0.97


@pytest.mark.parametrize("total", [10, 40, 200])
def test_shares_are_covered_as_wilson_says(total: int) -> None:
    """Exactly, by the binomial: on average over true shares, and never far below."""
    counts = np.arange(total + 1)
    intervals = [proportion_interval(int(count), total) for count in counts]
    lows, highs = np.array([[i.low, i.high] for i in intervals if i], dtype=float).T
    shares = np.linspace(0.01, 0.99, 197)
    held = (lows <= shares[:, None]) & (shares[:, None] <= highs)
    coverage = (held * stats.binom.pmf(counts, total, shares[:, None])).sum(axis=1)
    assert 0.945 < coverage.mean() < 0.96
    assert coverage.min() > 0.83  # of shares near 0 or 1, which is known of Wilson's interval
    theirs = [stats.binomtest(int(c), total).proportion_ci(method="wilson") for c in counts]
    np.testing.assert_allclose(lows, [bounds.low for bounds in theirs], atol=1e-12)
    np.testing.assert_allclose(highs, [bounds.high for bounds in theirs], atol=1e-12)


def test_a_share_of_nothing_is_none() -> None:
    assert proportion_interval(0, 0) is None
    none_seen = proportion_interval(0, 1000)
    assert none_seen is not None and none_seen.low == 0
    assert round(none_seen.high or 0, 4) == 0.0038


# --- what there is too little of ---


def test_too_little_has_no_interval() -> None:
    assert ratio_interval([], []) is None
    assert ratio_interval([1, 2], [0, 0]) is None
    assert mean_interval([]) is None
    assert ratio_interval([3], [2]) == Interval(1.5)
    assert ratio_interval([3, 3], [2, 2]) == Interval(1.5, 1.5, 1.5)
    # Every draw of equal requests is alike, whatever rounding makes of it.
    equal = ratio_interval([1 / 3] * 9, [0.7] * 9)
    assert equal is not None and equal.low == equal.value == equal.high
    # Draws of requests that are all alike are not rare here, and say nothing of the spread.
    assert ratio_interval([3, 4], [2, 2]) == Interval(1.75)
    assert ratio_interval([3, 4, 5], [2, 2, 2]) == Interval(2.0)
    for tops, is_bounded in (
        ([3, 4, 5, 6], True),
        ([0.1] * 18 + [1 / 3, 1 / 7], False),
        ([0.1] * 15 + [1 / 3, 1 / 7, 0.2, 0.3, 0.4], True),
    ):
        found = ratio_interval(tops, [0.3] * len(tops))
        assert found is not None and (found.low is not None) == is_bounded
    some = list(range(1, 21))
    for num_changed, is_bounded in ((2, False), (8, True)):
        other = [a + (n < num_changed) for n, a in enumerate(some)]
        found = quotient_interval((some, [1] * 20), (other, [1] * 20))
        assert found is not None and (found.low is not None) == is_bounded


def test_an_interval_is_shown_with_its_bounds() -> None:
    assert str(Interval(1.5)) == "1.500"
    assert str(Interval(1.5, 1.25, 2)) == "1.500 [1.250, 2.000]"
    assert Interval(1.5, 1, 2).as_json() == {"value": 1.5, "low": 1, "high": 2}


def test_a_quotient_needs_a_base_above_nothing() -> None:
    some, none = ([1, 2], [1, 1]), ([0, 0], [1, 1])
    assert quotient_interval(none, some) is None
    assert quotient_interval(some, ([1, 2], [0, 0])) is None
    assert quotient_interval(some, none) == Interval(0.0, 0.0, 0.0)
    assert quotient_interval(([4], [2]), ([3], [1])) == Interval(1.5)
    assert quotient_interval(([4], [2]), ([0], [1])) == Interval(0.0)
    assert quotient_of(Interval(0.0), Interval(1.0)) is None
    assert quotient_of(Interval(2.0), Interval(3.0, 2, 4)) == Interval(1.5)
    assert quotient_of(Interval(2.0, 0.0, 3), Interval(3.0, 2, 4)) == Interval(1.5)
    assert quotient_of(Interval(2.0, 1.0, 3), Interval(0.0, 0, 4)) == Interval(0.0, 0.0, 4.0)
    reaching_zero = quotient_of(Interval(2.0, 1.0, 3), Interval(2.0, -1, 4))
    assert reaching_zero is not None and reaching_zero.low == 0
    exact = quotient_of(Interval(2.0, 2.0, 2.0), Interval(3.0, 2.0, 4.0))
    assert exact is not None
    assert (exact.low, exact.high) == pytest.approx((1.0, 2.0))


requests = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50), st.integers(1, 50)),
    min_size=2,
    max_size=12,
)


@given(requests)
def test_equal_runs_are_equal_to_the_last_bit(rows: list[tuple[int, int, int, int]]) -> None:
    tops, bottoms = [row[0] / 3 for row in rows], [row[1] / 7 for row in rows]
    run = (tops, bottoms)
    assert quotient_interval(run, run) == Interval(1.0, 1.0, 1.0)
    assert swap_probability(run, run) == 1.0


@given(requests)
def test_a_quotient_is_of_sums_and_turns_with_its_runs(
    rows: list[tuple[int, int, int, int]],
) -> None:
    a, b, c, d = zip(*rows, strict=True)
    there = quotient_interval((a, b), (c, d), draws=200)
    back = quotient_interval((c, d), (a, b), draws=200)
    assert there is not None and back is not None
    assert math.isclose(there.value, sum(c) / sum(d) / (sum(a) / sum(b)))
    assert math.isclose(there.value * back.value, 1)
    assert (there.low is None) == (back.low is None)
    if there.low is not None and there.high is not None and back.high is not None:
        assert there.low <= there.high
        assert math.isclose(there.low * back.high, 1, rel_tol=1e-6)
    assert swap_probability((a, b), (c, d), draws=50) == swap_probability((c, d), (a, b), draws=50)


@pytest.mark.parametrize("num_changed", [1, 3, 5, 6, 8])
def test_few_changed_requests_can_be_chance(num_changed: int) -> None:
    """All in one direction: of m the swaps give that in 2 of 2**m."""
    steps = np.full(20, 50.0)
    tokens = np.full(20, 100.0)
    fewer = tokens - 10 * (np.arange(20) < num_changed)
    found = swap_probability((tokens, steps), (fewer, steps), draws=20_000)
    exact = 2 / 2**num_changed
    assert abs(found - exact) < 5 * math.sqrt(exact / 20_000) + 1e-4
    assert (found <= 0.05) == (num_changed >= 6)


def test_to_nothing_or_from_it_is_no_chance() -> None:
    steps = np.full(8, 10.0)
    assert swap_probability((steps, steps), (np.zeros(8), steps)) < 0.02
    assert swap_probability((np.zeros(8), steps), (steps, steps)) < 0.02
    assert swap_probability((np.zeros(8), steps), (np.zeros(8), steps)) == 1.0
    assert swap_probability((steps, np.zeros(8)), (steps, steps)) == 1.0
