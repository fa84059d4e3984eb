"""`specdec sim batching`: the published runs, and a simulation slot by slot as the oracle."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals.batching import run as batching_run
from specdec.evals.batching.command import batching
from specdec.evals.batching.policies import Schedule, continuous, dynamic, policies, static
from specdec.evals.batching.run import BatchingSettings, run
from specdec.evals.batching.workload import Workload
from specdec.evals.report.spread import percentile
from tests.evals.toy_folder import toy_config, write_toy

workloads = st.builds(
    lambda lengths, gaps: Workload(tuple(lengths), tuple(np.cumsum(gaps[: len(lengths)]).tolist())),
    st.lists(st.integers(1, 12), min_size=1, max_size=30),
    st.one_of(st.just([0] * 30), st.lists(st.integers(0, 9), min_size=30, max_size=30)),
)
slots = st.integers(1, 7)


def test_the_published_runs_come_out_to_the_digit() -> None:
    random.seed(7)
    lengths = [random.randint(10, 500) for _ in range(1000)]
    workload = Workload.drawn(1000, 10, 500, seed=7)
    assert list(workload.lengths) == lengths
    assert static(workload, 8).num_steps == 55128 and continuous(workload, 8).num_steps == 31111
    assert static(workload, 32).num_steps == 15492 and continuous(workload, 32).num_steps == 8019


def test_static_batches_use_59_percent_of_their_slots() -> None:
    lengths = np.random.default_rng(7).integers(20, 600, (25, 8), endpoint=True)
    workload = Workload.drawn(25 * 8, 20, 600, seed=7, generator="numpy")
    assert list(workload.lengths) == lengths.ravel().tolist()
    schedule = static(workload, 8)
    assert schedule.num_steps == lengths.max(1).sum()
    assert f"{schedule.utilisation:.0%}" == "59%"
    by_batch = (lengths.sum(1) / (8 * lengths.max(1))).mean()  # the other way to say it
    assert f"{by_batch:.0%}" == "59%"


def slot_by_slot(workload: Workload, num_slots: int, max_wait: float | None) -> list[int]:
    """When requests begin, one step after the other; without `max_wait`, continuous batching."""
    left = [0] * num_slots  # tokens that each slot's request still wants
    waiting = list(range(len(workload.lengths)))
    starts = [-1] * len(waiting)
    step = 0
    while waiting:
        here = [number for number in waiting if workload.arrivals[number] <= step]
        takes: list[int] = []
        if max_wait is None:
            takes = here[: left.count(0)]
        elif not any(left) and here:
            is_full = len(here) >= num_slots or len(here) == len(waiting)
            if is_full or step - workload.arrivals[here[0]] >= max_wait:
                takes = here[:num_slots]
        for number in takes:
            starts[number] = step
            left[left.index(0)] = workload.lengths[number]
            waiting.remove(number)
        left = [max(0, tokens - 1) for tokens in left]
        step += 1
    return starts


@given(workloads, slots, st.one_of(st.integers(0, 12), st.just(math.inf)))
def test_batches_begin_as_slot_by_slot(workload: Workload, num_slots: int, wait: float) -> None:
    starts = slot_by_slot(workload, num_slots, wait)
    assert list(dynamic(workload, num_slots, wait).starts) == starts
    if wait == math.inf:
        assert list(static(workload, num_slots).starts) == starts


@given(workloads, slots)
def test_freed_slots_are_taken_as_slot_by_slot(workload: Workload, num_slots: int) -> None:
    expected = slot_by_slot(workload, num_slots, None)
    assert list(continuous(workload, num_slots).starts) == expected


def counted(schedule: Schedule) -> list[int]:
    """Requests that hold a slot, by step."""
    held = list(zip(schedule.starts, schedule.workload.lengths, strict=True))
    end = max(start + length for start, length in held)
    return [sum(start <= step < start + size for start, size in held) for step in range(end)]


@given(workloads, slots, st.integers(0, 12))
def test_what_holds_for_every_policy(workload: Workload, num_slots: int, wait: int) -> None:
    total = sum(workload.lengths)
    found = {name: policy(workload, num_slots) for name, policy in policies(wait).items()}
    for schedule in found.values():
        active = counted(schedule)
        assert schedule.active.tolist() == active and max(active) <= num_slots
        assert schedule.num_steps == sum(count > 0 for count in active)
        assert schedule.num_steps + schedule.num_idle == len(active)
        assert schedule.num_steps >= -(-total // num_slots)
        assert schedule.utilisation == total / (num_slots * schedule.num_steps) <= 1
        assert min(schedule.waits) >= 0
        # In order of arrival, nobody can begin earlier than where a freed slot is taken at once.
        best = found["continuous"]
        assert all(a <= b for a, b in zip(best.starts, schedule.starts, strict=True))
        if not any(workload.arrivals):
            assert best.num_steps <= schedule.num_steps and best.num_idle == 0
            assert schedule.starts == found["static"].starts or schedule is best


def test_arrivals_are_poisson_and_leave_the_lengths_alone() -> None:
    at_once, spread = (Workload.drawn(20_000, 1, 9, seed=3, rate=rate) for rate in (0.0, 0.25))
    assert at_once.lengths == spread.lengths and set(at_once.arrivals) == {0}
    gaps = np.diff(spread.arrivals)
    assert min(gaps) >= 0
    # Five standard errors of 20,000 exponential gaps, rounded up to whole steps.
    assert abs(gaps.mean() - 4) < 5 * 4 / 20_000**0.5
    assert abs((gaps == 0).mean() - (1 - (1 - math.exp(-0.25)) / 0.25)) < 5 * 0.5 / 20_000**0.5
    with pytest.raises(UsageError, match="more than 10000000 steps"):
        Workload.drawn(10, 1, 9, seed=3, rate=1e-9)
    with pytest.raises(UsageError, match="more than 10000000 steps"):
        Workload.drawn(10, 5_000_000, 5_000_000, seed=3)


def settings_of(**changes: Any) -> BatchingSettings:
    return BatchingSettings(
        **{
            "num_requests": 60,
            "shortest": 1,
            "longest": 30,
            "slots": (2, 5),
            "seed": 7,
            "rate": 0.0,
            "max_wait": 4,
            "generator": "python",
            **changes,
        }
    )


def test_the_report_says_what_the_schedules_do(tmp_path: Path) -> None:
    report = run(settings_of(rate=0.2), tmp_path)
    data = json.loads((tmp_path / "batching.json").read_text())
    workload = Workload.drawn(60, 1, 30, seed=7, rate=0.2)
    assert data["tokens"] == sum(workload.lengths)
    rows = {(row["slots"], row["policy"]): row for row in data["rows"]}
    assert len(rows) == 6 == len(report.tables[0].rows)
    by_name: dict[str, Callable[[Workload, int], Schedule]] = {
        "static": static,
        "dynamic": lambda load, number: dynamic(load, number, 4),
        "continuous": continuous,
    }
    for (num_slots, name), row in rows.items():
        schedule = by_name[name](workload, num_slots)
        assert row["steps"] == schedule.num_steps and row["idle_steps"] == schedule.num_idle
        ends = np.array(schedule.starts) + workload.lengths
        assert row["latency_steps"]["mean"] == pytest.approx((ends - workload.arrivals).mean())
        assert row["wait_steps"]["p99"] == percentile(schedule.waits, 99)
        assert row["seconds"] is None
    compared = {(entry["of"], entry["figure"]): entry for entry in data["compared"]}
    assert compared["continuous, 5 slots", "steps"]["value"] == rows[5, "continuous"]["steps"]
    assert {"batching-slots.png", "batching-steps.png", "batching.html"} <= {
        file.name for file in tmp_path.iterdir()
    }


def test_a_step_costs_what_its_requests_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching_run, "measured_price", lambda *_: [0.0, 1.0, 1.5].__getitem__)
    data = run(settings_of(slots=(2,), config=EngineConfig()), None).data
    workload = Workload.drawn(60, 1, 30, seed=7)
    for row in data["rows"]:
        alone = 2 * row["steps"] - sum(workload.lengths)  # steps in which one slot is empty
        seconds = alone + 1.5 * (row["steps"] - alone)
        assert row["seconds"] == pytest.approx(seconds)
        assert row["tokens_per_second"] == pytest.approx(sum(workload.lengths) / seconds)


def test_the_price_is_measured_on_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    config = toy_config(write_toy(tmp_path / "model"), "torch")
    settings = settings_of(config=config)
    price = batching_run.measured_price(config, settings, Workload.drawn(60, 1, 30, seed=7))
    prices = [price(number) for number in range(6)]
    assert prices[0] == 0.0 < prices[1] and prices == sorted(prices)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": "500-10"}, "--lengths must be like 10-500"),
        ({"lengths": "0-10"}, "--lengths must be like 10-500"),
        ({"lengths": "ten"}, "--lengths must be like 10-500"),
        ({"slots": "8,x"}, "--slots takes numbers"),
        ({"slots": "0"}, "--slots must be between 1 and 4096"),
        ({"arrivals": -1.0}, "--arrivals must be 0 or more"),
        ({"arrivals": math.nan}, "--arrivals must be 0 or more"),
        ({"generator": "dice"}, "--generator must be python or numpy"),
        ({"model": "some"}, "--model needs --measured"),
        ({"threads": 2}, "--threads needs --measured"),
        ({"measured": True, "weights": "int3"}, "unknown weights"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        batching(**options)
