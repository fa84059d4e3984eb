"""Changes between two runs: what is sure is found, and chance is not called a change."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from specdec.evals.compare.change import Mark
from specdec.evals.report.intervals import Interval
from tests.evals.compared_entries import Parts, between, entry, scaled


@pytest.mark.parametrize(
    ("scale", "is_higher_better", "mark"),
    [
        (1.0, True, Mark.SAME),
        (0.99, True, Mark.SAME),
        (0.97, True, Mark.WORSE),
        (1.03, True, Mark.BETTER),
        (0.97, False, Mark.BETTER),
        (1.03, False, Mark.WORSE),
        (0.0, True, Mark.WORSE),
    ],
)
def test_what_all_samples_agree_in_is_sure(
    scale: float, is_higher_better: bool, mark: Mark
) -> None:
    base = entry(parts=scaled(), is_higher_better=is_higher_better)
    change = between(base, entry(parts=scaled(scale), is_higher_better=is_higher_better))
    assert change.ratio is not None and change.ratio.low is not None
    assert change.ratio.value == pytest.approx(scale)
    assert change.mark is mark
    assert (change.num_paired, change.basis) == (20, "20 paired")


def test_only_common_samples_are_paired() -> None:
    base = entry(parts={**scaled(), "only here": (1e6, 1)})
    change = between(base, entry(parts={"only there": (1e-6, 1), **scaled(1.5)}))
    assert change.num_paired == 20
    assert change.ratio is not None and change.ratio.value == pytest.approx(1.5)
    assert change.value == pytest.approx(1.5 * change.base)
    assert change.base == pytest.approx(entry(parts=scaled()).interval.value)
    assert change.mark is Mark.BETTER


def test_few_changed_samples_are_not_called_a_change() -> None:
    """All in one direction, and far beyond the tolerance."""
    for num_changed, mark in ((3, Mark.UNSURE), (5, Mark.UNSURE), (9, Mark.WORSE)):
        parts = {
            name: (0.5 * a if place < num_changed else a, b)
            for place, (name, (a, b)) in enumerate(scaled().items())
        }
        change = between(entry(parts=scaled()), entry(parts=parts))
        assert change.ratio is not None and change.ratio.value < 0.97
        assert change.mark is mark


@pytest.mark.parametrize(
    ("num_faults", "mark"), [(0, Mark.UNSURE), (5, Mark.UNSURE), (8, Mark.WORSE)]
)
def test_faults_where_there_were_none_are_found(num_faults: int, mark: Mark) -> None:
    none = {str(n): (0.0, 1.0) for n in range(20)}
    some = {str(n): (float(n < num_faults), 1.0) for n in range(20)}
    base = entry("all", "faults", none, is_higher_better=False)
    change = between(base, entry("all", "faults", some, is_higher_better=False))
    assert (change.base, change.value, change.ratio) == (0, num_faults / 20, None)
    assert (change.mark, change.basis) == (mark, "20 paired")
    assert change.gain == (0 if num_faults else 1)


@pytest.mark.parametrize(
    ("base", "other", "mark", "basis"),
    [
        (Interval(2, 1.9, 2.1), Interval(1.5, 1.4, 1.6), Mark.WORSE, "intervals"),
        (Interval(1.5, 1.4, 1.6), Interval(2, 1.9, 2.1), Mark.BETTER, "intervals"),
        (Interval(2, 1.9, 2.1), Interval(1.9, 1.8, 2.0), Mark.UNSURE, "intervals"),
        (Interval(2, 1.999, 2.001), Interval(1.99, 1.989, 1.991), Mark.SAME, "intervals"),
        (Interval(2, 1.9, 2.1), Interval(0, 0, 0.1), Mark.WORSE, "intervals"),
        (Interval(2), Interval(1.0), Mark.UNSURE, "figures"),
        (Interval(2, 1.9, 2.1), Interval(1.0), Mark.UNSURE, "figures"),
        (Interval(0), Interval(1.0), Mark.UNSURE, "figures"),
        (Interval(0, 0, 0.01), Interval(0.1, 0.02, 0.2), Mark.BETTER, "figures"),
        (Interval(0, 0, 0.03), Interval(0.1, 0.02, 0.2), Mark.UNSURE, "figures"),
    ],
)
def test_without_common_samples_intervals_decide(
    base: Interval, other: Interval, mark: Mark, basis: str
) -> None:
    one_common = {"1": (3.0, 2.0)}
    change = between(
        entry(interval=base, parts=one_common), entry(interval=other, parts=one_common)
    )
    assert (change.mark, change.basis, change.num_paired) == (mark, basis, 0)
    assert (change.base, change.value) == (base.value, other.value)
    if base.value:
        assert change.ratio is not None and change.ratio.value == other.value / base.value
    json.dumps(change.as_json(), allow_nan=False)


def test_the_tolerance_is_of_the_change_and_not_of_its_interval() -> None:
    base, other = Interval(100, 99.9, 100.1), Interval(97, 96.9, 97.1)
    marks = [
        between(entry(interval=base), entry(interval=other), t).mark for t in (0, 0.029, 0.031)
    ]
    assert marks == [Mark.WORSE, Mark.WORSE, Mark.UNSURE]


# --- chance ---


def of_samples(rng: np.random.Generator, number: int = 20) -> Callable[[], Parts]:
    """Draws runs of the same truth over the same samples."""
    steps, share = rng.integers(20, 100, number), rng.beta(0.6, 2.4, number)
    return lambda: {
        str(n): (float(s + k), float(s))
        for n, (s, k) in enumerate(zip(steps, rng.binomial(4 * steps, share), strict=True))
    }


def mostly_equal(rng: np.random.Generator) -> Callable[[], Parts]:
    """As greedy answers are: a few of them tip over, on either side."""
    base = scaled()
    return lambda: {
        name: (a * (rng.uniform(0.3, 3) if rng.random() < 0.08 else 1), b)
        for name, (a, b) in base.items()
    }


def timings(rng: np.random.Generator) -> Callable[[], Parts]:
    tokens = rng.integers(40, 128, 12)
    return lambda: {
        str(n): (float(8 * t * rng.lognormal(0, 0.2)), float(t)) for n, t in enumerate(tokens)
    }


NUM_PAIRS = 300
# Of 2.5 %, and three standard deviations of as many pairs.
MOST_ALARMS = NUM_PAIRS * 0.025 + 3 * (NUM_PAIRS * 0.025) ** 0.5


@pytest.mark.parametrize(
    ("population", "is_paired"),
    [(of_samples, True), (mostly_equal, True), (timings, True), (of_samples, False)],
)
def test_two_runs_of_one_truth_are_rarely_called_worse(
    population: Callable[[np.random.Generator], Callable[[], Parts]], is_paired: bool
) -> None:
    rng = np.random.default_rng(2026)
    marks = []
    for _ in range(NUM_PAIRS):
        draw = population(rng)
        base = entry(parts=draw())
        other = entry(parts=(draw if is_paired else population(rng))())
        if not is_paired:  # of other samples
            parts = {f"other {name}": part for name, part in other.parts.items()}
            other = entry(parts=parts)
        marks.append(between(base, other, tolerance=0.0).mark)
    assert marks.count(Mark.WORSE) <= MOST_ALARMS
    assert marks.count(Mark.BETTER) <= MOST_ALARMS


def test_a_regression_of_a_tenth_is_nearly_always_found() -> None:
    rng = np.random.default_rng(7)
    marks = []
    for _ in range(100):
        draw = of_samples(rng)
        worse = {name: (0.9 * a, b) for name, (a, b) in draw().items()}
        marks.append(between(entry(parts=draw()), entry(parts=worse)).mark)
    assert marks.count(Mark.WORSE) > 90
    assert marks.count(Mark.BETTER) == 0
