"""Loops: load is constant, counted requests are the ones that were promised, schedules are kept."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specdec.evals.client.exchange import Exchange, Outcome
from specdec.evals.load.arrivals import Schedule, arrival_times
from specdec.evals.load.extent import Extent
from specdec.evals.load.level import Level
from specdec.evals.load.load_run import LoadRun
from specdec.evals.load.loops import MAX_ERRORS, PAUSE_S, run_level
from tests.evals.virtual_time import VirtualLoop, run_virtually, server_of

seconds = st.integers(1, 400).map(lambda ticks: ticks / 1024)  # added up without rounding
answers = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12)


def run(
    level: Level,
    extent: Extent,
    answered: list[tuple[float, float]],
    outcomes: tuple[Outcome, ...] = (),
    burstiness: float = 1.0,
) -> LoadRun:
    async def work(loop: VirtualLoop) -> LoadRun:
        send = server_of(loop, answered, outcomes)
        return await run_level(level, send, extent, burstiness=burstiness, clock=loop.time)

    return run_virtually(work)


def num_open(found: LoadRun, at: float) -> int:
    return sum(one.exchange.sent_at <= at < one.end_at for one in found.sent)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), answers)
def test_clients_are_as_many_until_all_that_counts_has_ended(
    concurrency: int, requests: int, answered: list[tuple[float, float]]
) -> None:
    found = run(Level(concurrency=concurrency), Extent(requests=requests), answered)
    own = {}  # the first answer of each client, which all begin at once
    for one in found.sent:
        if one.exchange.sent_at == 0 and one.index < concurrency:
            own[one.index] = one.end_at
    assert found.begin_at == pytest.approx(max(own.values()))
    after = [one for one in found.sent if one.exchange.sent_at > found.begin_at]
    assert len(found.counted) == requests
    assert {one.index for one in found.counted} <= {
        one.index for one in found.sent if one.exchange.sent_at >= found.begin_at
    }
    assert [one.index for one in after if not one.is_counted] == [
        one.index for one in after if one.index > found.counted[-1].index
    ], "the first ones after the warm-up count"
    assert found.end_at == max(one.end_at for one in found.counted)
    moments = {one.exchange.sent_at for one in found.sent} | {one.end_at for one in found.sent}
    for at in moments:
        if at < found.end_at:
            assert num_open(found, at) == concurrency


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(0, 9), st.integers(1, 9), answers)
def test_the_warm_up_is_so_many_requests(
    concurrency: int, warmup: int, requests: int, answered: list[tuple[float, float]]
) -> None:
    extent = Extent(requests=requests, warmup=warmup)
    found = run(Level(concurrency=concurrency), extent, answered)
    assert [one.index for one in found.counted] == list(range(warmup, warmup + requests))
    assert found.begin_at == found.counted[0].exchange.sent_at


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), seconds, answers)
def test_a_duration_counts_what_is_sent_within_it(
    concurrency: int, duration: float, answered: list[tuple[float, float]]
) -> None:
    found = run(Level(concurrency=concurrency), Extent(duration_s=duration), answered)
    begin = found.begin_at
    within = [one for one in found.sent if begin < one.exchange.sent_at < begin + duration]
    assert all(one.is_counted for one in within)
    late = [one for one in found.counted if one.exchange.sent_at >= begin + duration]
    assert not late or len(found.counted) == 1, "at least one counts"


def test_an_open_loop_does_not_wait_for_answers() -> None:
    extent = Extent(requests=50, warmup=5)
    found = run(Level(rate=2.0), extent, [(30.0, 30.0)])
    expected = list(islice(arrival_times(2.0, 1.0, 0), 55))
    assert [one.exchange.sent_at for one in found.sent] == pytest.approx(expected)
    assert [one.index for one in found.counted] == list(range(5, 55))
    assert found.begin_at == pytest.approx(expected[4])
    assert max(one.late_s for one in found.sent) < 1e-6
    assert found.end_at == pytest.approx(expected[-1] + 60)


def test_a_late_client_sends_at_once_and_says_how_late() -> None:
    """The client itself is busy for 3 s; requests that fell due meanwhile keep their times."""
    schedule = list(islice(arrival_times(2.0, 1.0, 0), 40))

    async def work(loop: VirtualLoop) -> LoadRun:
        answer = server_of(loop, [(0.5, 0.5)])

        async def send(index: int) -> Exchange:
            if index == 10:
                loop.now += 3.0
            return await answer(index)

        return await run_level(
            Level(rate=2.0), send, Extent(requests=40, warmup=0), clock=loop.time
        )

    found = run_virtually(work)
    assert [one.due_at for one in found.sent] == pytest.approx(schedule)
    free_at = schedule[10] + 3.0
    for one, due in zip(found.sent, schedule, strict=True):
        is_overdue = one.index >= 10 and due < free_at
        assert one.late_s == pytest.approx(free_at - due if is_overdue else 0.0, abs=1e-6)
    assert found.busy.lag_max_s > 2.9
    warning = found.busy.warning(3.0)
    assert warning is not None
    assert "sent 3000 ms late" in warning


@pytest.mark.parametrize("level", [Level(concurrency=3), Level(rate=5.0)])
def test_a_level_is_given_up_after_errors_in_a_row(level: Level) -> None:
    outcomes: tuple[Outcome, ...] = ("ok", "error") + ("error",) * MAX_ERRORS
    found = run(level, Extent(requests=500, warmup=0), [(0.25, 0.25)], outcomes)
    assert "errors in a row; the last: no" in found.stopped
    assert MAX_ERRORS < len(found.sent) < 3 * MAX_ERRORS
    assert [one.index for one in found.sent] == list(range(len(found.sent))), "nothing is lost"


def test_errors_between_answers_do_not_end_a_level() -> None:
    outcomes: tuple[Outcome, ...] = ("ok", "error", "overloaded", "error")
    found = run(Level(concurrency=1), Extent(requests=200, warmup=0), [(0.25, 0.25)], outcomes)
    assert not found.stopped
    assert len(found.counted) == 200
    refused = [one for one in found.sent if one.exchange.outcome != "ok"]
    following = {one.index: one for one in found.sent}
    for one in refused:
        if one.index + 1 in following:
            pause = following[one.index + 1].exchange.sent_at - one.end_at
            assert pause == pytest.approx(PAUSE_S)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_spread_as_burstiness_says(burstiness: float) -> None:
    rate, number = 3.0, 20_000
    gaps = np.diff([0.0, *islice(arrival_times(rate, burstiness, 1), number)])
    deviation = gaps.std() / gaps.mean()
    assert gaps.mean() * rate == pytest.approx(1, abs=4 / np.sqrt(burstiness * number))
    assert deviation * np.sqrt(burstiness) == pytest.approx(1, abs=0.05)
    expected = stats.gamma(burstiness, scale=1 / (rate * burstiness))
    assert stats.kstest(gaps, expected.cdf).pvalue > 0.001


def test_a_schedule_ends_by_time() -> None:
    found = Schedule.draw(4.0, 1.0, 3, Extent(duration_s=50.0))
    times = list(islice(arrival_times(4.0, 1.0, 3), 400))
    assert len(found.warmup) == 20, "a tenth of what comes"
    assert found.begin == times[19]
    assert list(found.counted) == [at for at in times[20:] if at < times[19] + 50.0]
    assert Schedule.draw(4.0, 1.0, 3, Extent(duration_s=1e-6)).counted, "at least one"


def test_a_level_without_a_number_has_some_per_client() -> None:
    assert Extent().at(Level(concurrency=4)).requests == 32
    assert Extent().at(Level(concurrency=1)).requests == 16
    assert Extent().at(Level(rate=0.5)).requests == 64
    assert Extent(duration_s=3).at(Level(rate=0.5)).requests is None
