"""Asking, Prober, Levels: when a drafter is asked, tried again, and how deep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.asking import (
    EXPLORE_EVERY,
    FIRST_PROBE,
    LAST_PROBE,
    NUM_LEVELS,
    PATIENCE,
    Asking,
    Levels,
    Prober,
)


@pytest.mark.parametrize("price", [0.004, 0.05, 0.2, 2.0])
def test_asking_ends_after_a_few_prices_and_one_good_probe_begins_it_again(price: float) -> None:
    asking = Asking(is_on=True)
    num_asks = 0
    while asking.is_on:
        asking.observe(0.0, price)
        num_asks += 1
    assert PATIENCE[0] < num_asks <= PATIENCE[1] + 1
    asking.observe(0.0, price)
    assert not asking.is_due
    asking.observe(4 * price, price)
    assert asking.is_due


def test_good_asks_make_up_for_bad_ones() -> None:
    asking = Asking(is_on=True)
    for index in range(200):  # one ask in eight brings eight times its price
        asking.observe(0.8 if index % 8 == 0 else 0.0, 0.1)
        assert asking.is_on


def test_probes_of_a_dear_drafter_grow_rare_and_those_of_a_cheap_one_do_not() -> None:
    intervals = {}
    for price in (0.004, 1.0):
        prober, steps = Prober(), []
        for step in range(1000):
            if prober.is_due:
                steps.append(step)
            prober.step(num_off=1, num_won=0, price=price)
        intervals[price] = np.diff(steps)
    assert intervals[0.004].max() <= FIRST_PROBE + 1
    assert intervals[1.0].max() == LAST_PROBE + 1


@given(
    asks=st.lists(
        st.tuples(
            st.lists(st.floats(-2.0, 5.0), min_size=NUM_LEVELS, max_size=NUM_LEVELS),
            st.integers(0, 40),
            st.floats(0.0, 1.0),
        ),
        max_size=2 * EXPLORE_EVERY,
    ),
    price=st.sampled_from([0.0, 1e-3, 0.5, 100.0]),
    num_asked=st.integers(1, 64),
)
def test_some_level_is_always_asked_for(
    asks: list[tuple[list[float], int, float]], price: float, num_asked: int
) -> None:
    levels = Levels()
    for values, num_levels, seconds in asks:
        levels.observe(np.array(values), num_levels, seconds, num_asked)
        assert 1 <= levels.deepest(price, num_asked) <= NUM_LEVELS + 1


def test_levels_that_bring_nothing_are_no_error() -> None:
    levels = Levels()
    for _ in range(9):
        levels.observe(np.zeros(NUM_LEVELS), 1, 0.1, 4)
        levels.forget()
        assert levels.deepest(0.1, 4) == 1
