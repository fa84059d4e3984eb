"""SteadyState: what is counted of so many streams, by its definition and by what it is for."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import SpecdecError
from specdec.evals.client.exchange import Arrival, Exchange
from specdec.evals.crossover.closed_loop import ClosedLoop
from specdec.evals.crossover.loop_run import LoopRun
from specdec.evals.crossover.server_loop import replayed
from specdec.evals.crossover.steady_state import SteadyState
from tests.evals.test_crossover_peers import tasks
from tests.toy import toy_engine

Told = list[tuple[float, int, int]]  # moment, request, tokens; its last one ends a request


def history(seed: int) -> tuple[int, int, Told]:
    """Streams that take the next request at the moment when theirs ends; steps bring 0 to 3."""
    rng = random.Random(seed)
    num_streams = rng.randint(1, 4)
    num_requests = 2 * num_streams + rng.randint(0, 4)
    running = list(range(num_streams))
    left = {number: rng.randint(1, 6) for number in running}  # tokens by request
    told, now = Told(), 0.0
    num_more = 3  # steps after the last counted request has ended, which are of no concern
    while num_more:
        num_more -= all(number >= num_requests for number in running)
        now += rng.randint(1, 8) / 8
        for place, number in enumerate(running):
            brought = min(left[number], rng.randint(0, 3))
            left[number] -= brought
            told.append((now, number, brought))
            if not left[number]:
                running[place] = len(left)
                left[len(left)] = rng.randint(1, 6)
    return num_streams, num_requests, told


def defined(num_streams: int, num_requests: int, told: Told) -> tuple[int, float]:
    """Tokens and seconds by the words of steady_state.py, from the whole history."""
    ends = {number: at for at, number, brought in told if brought}  # of those that do end
    begin = sorted(ends.values())[num_streams - 1]
    end = sorted(ends.values())[num_requests - 1]
    return sum(brought for at, _, brought in told if begin < at <= end), end - begin


def fed(num_streams: int, num_requests: int, told: Told) -> LoopRun:
    state = SteadyState(num_streams, num_requests)
    last = {number: index for index, (_, number, brought) in enumerate(told) if brought}
    for _ in range(num_streams):
        state.begin()
    for index, (at, number, brought) in enumerate(told):
        state.note(number, brought, at, is_last=index == last.get(number))
    return state.run([None] * num_requests)


@given(st.integers(min_value=0))
def test_the_steady_state_is_what_it_is_defined_as(seed: int) -> None:
    told = history(seed)
    num_tokens, seconds = defined(*told)
    if seconds:
        run = fed(*told)
        assert run.num_tokens == num_tokens and run.seconds == pytest.approx(seconds)
    else:
        with pytest.raises(SpecdecError, match="allow more tokens"):
            fed(*told)


@pytest.mark.parametrize("delay", [0, 3])
def test_as_many_prompts_are_read_as_answers_are_given(delay: int) -> None:
    """Two streams of answers of 6 steps, a prompt in each answer's first step, which takes long.

    Whether they keep step or one is behind must not change the speed.
    """
    state, now = SteadyState(2, 12), 0.0
    running = {state.begin(): 0, state.begin(): -delay}  # steps done, by request
    while not state.is_over:
        now += 1.0 + 4.0 * sum(done == 0 for done in running.values())
        for number, done in list(running.items()):
            running[number] += 1
            if done >= 0:
                state.note(number, 1, now, is_last=done == 5)
            if done == 5:
                del running[number]
                running[state.begin()] = 0
    run = state.run([None] * 12)
    assert run.num_tokens / run.seconds == pytest.approx(12 / 14, rel=0.02)


def test_answers_that_leave_nothing_to_time_are_told() -> None:
    state = SteadyState(1, 2)
    for _ in range(2):
        state.note(state.begin(), 3, 1.0, is_last=True)
    with pytest.raises(SpecdecError, match="allow more tokens"):
        state.run([None] * 2)


def test_an_engine_and_clients_that_saw_the_same_count_the_same() -> None:
    """Every arrival of an engine's run, told over again as clients' exchanges."""
    arrivals: dict[int, list[Arrival]] = {}
    note = SteadyState.note

    def noted(
        self: SteadyState, number: int, num_tokens: int, now: float, *, is_last: bool
    ) -> None:
        arrivals.setdefault(number, []).append(Arrival(now - 1.0, num_tokens))
        note(self, number, num_tokens, now, is_last=is_last)

    engine = toy_engine(drafter_name="ngram", node_budget=5)
    with patch.object(SteadyState, "note", noted):
        run = ClosedLoop(engine).run(tasks(4, 11, 7), 3, 7)
    exchanges = {
        number: Exchange(1.0, 0.0, "ok", arrivals=tuple(a for a in found if a.num_tokens))
        for number, found in arrivals.items()
    }
    again = replayed(exchanges, 3, 7)
    assert again.num_tokens == run.num_tokens and again.seconds == pytest.approx(run.seconds)
