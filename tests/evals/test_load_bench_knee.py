"""Knee and gain: where more load stops paying, and where drafting does, on known curves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.evals.load.gain import crossover, gains
from specdec.evals.load.knee import knee


def test_the_knee_of_known_curves() -> None:
    clients = [1, 2, 4, 8, 16, 32]
    ideal = [min(10.0 * n, 85.0) for n in clients]  # full with 8.5
    assert clients[knee(ideal, [n / t for n, t in zip(clients, ideal, strict=True)]) or 0] == 8
    rates = np.linspace(0.05, 0.95, 19)  # M/M/1 of one request per second: power peaks at half
    found = knee(rates.tolist(), (1 / (1 - rates)).tolist())
    assert found is not None
    assert rates[found] == pytest.approx(0.5)
    amdahl = [n / (1 + 0.1 * (n - 1)) for n in clients]  # elasticity is a half at 9
    responses = [n / t for n, t in zip(clients, amdahl, strict=True)]
    assert clients[knee(amdahl, responses) or 0] == 8


def test_there_is_no_knee_before_the_curve_bends() -> None:
    assert knee([10, 20, 40], [1.0, 1.0, 1.0]) is None
    assert knee([10, 20, 40], [1.0, 1.0, 1.0], [0, 0, 0.5]) == 1, "the last serves too few"
    assert knee([10, 5, 2], [1.0, 4.0, 9.0]) == 0
    assert knee([0, 0], [None, None]) is None
    assert knee([], []) is None
    assert knee([10], [1.0]) is None


def level(label: str, load: float, rate: float, is_off: bool = False) -> dict[str, Any]:
    return {
        "label": label,
        "load": load,
        "output_throughput": rate,
        "is_off": is_off,
        "completed": 1,
    }


def test_gain_is_over_the_series_without_drafts() -> None:
    levels = [
        *(level("off", load, 10 * load, True) for load in (1.0, 2.0, 4.0)),
        *(level("on", load, rate) for load, rate in ((1.0, 20.0), (2.0, 30.0), (4.0, 20.0))),
    ]
    assert gains(levels) == {"on": {1.0: 2.0, 2.0: 1.5, 4.0: 0.5}}
    assert crossover(gains(levels)["on"]) == pytest.approx(2 * 2**0.5), "halfway on a log axis"
    assert gains(levels[3:]) == {}
    assert gains([*levels, level("off too", 1.0, 1.0, True)]) == {}


def test_the_crossover_is_where_gain_first_falls_below_one() -> None:
    assert crossover({1.0: 1.5, 4.0: 0.5}) == pytest.approx(2.0)
    assert crossover({1.0: 1.5, 2.0: 1.0}) is None
    assert crossover({2.0: 0.9, 4.0: 0.8}) == 0.0
    assert crossover({1.0: 2.0, 2.0: 1.0, 4.0: 0.5}) == pytest.approx(2.0)
    assert crossover({}) is None
