"""LoadMetrics: times are per token, whatever a step brings; an accepted request ends once."""

from __future__ import annotations

import pytest

from specdec.counters import Histogram
from specdec.params import SamplingParams
from specdec.request import FinishReason, TokenRecord
from specdec.server.load_metrics import LATELY_S, LoadMetrics, Recent
from specdec.server.messages import Output, Submit


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def load(clock: Clock) -> LoadMetrics:
    return LoadMetrics(clock)


def begin(load: LoadMetrics, clock: Clock, request_id: str = "r", num_prompt: int = 7) -> None:
    """Arrive, and be accepted a second later."""
    load.begin([Submit(request_id, (1,) * num_prompt, SamplingParams())], clock.now)
    clock.now += 1
    load.take(Output(request_id))


def tokens(
    load: LoadMetrics, count: int, reason: FinishReason | None = None, request_id: str = "r"
) -> None:
    records = [TokenRecord(5, ("target",), 1, 0)] * count
    load.take(Output(request_id, records, reason))


def num(histogram: Histogram) -> int:
    return sum(histogram.counts)


def test_a_burst_counts_per_token_and_once_per_step(load: LoadMetrics, clock: Clock) -> None:
    begin(load, clock)
    clock.now += 2
    tokens(load, 3)  # nothing came before them
    assert (num(load.first_token_s), load.first_token_s.sum) == (1, 3)
    assert num(load.inter_token_s) == num(load.inter_step_s) == 0
    clock.now += 0.04
    tokens(load, 4)
    clock.now += 0.5
    tokens(load, 1, "length")
    assert num(load.inter_token_s) == 5
    bounds = load.inter_token_s.bounds
    assert load.inter_token_s.counts[bounds.index(0.01)] == 4, "four times 0.04 / 4"
    assert load.inter_token_s.counts[bounds.index(0.5)] == 1
    assert num(load.inter_step_s) == 2
    assert load.inter_token_s.sum == pytest.approx(0.54) == load.inter_step_s.sum
    assert load.per_output_token_s.sum == pytest.approx(0.54 / 7)
    assert load.end_to_end_s.sum == pytest.approx(3.54)
    assert (load.num_prompt, load.num_output) == (7, 8)
    assert (load.prompt_len.sum, load.output_len.sum) == (7, 8)


def test_an_answer_of_one_token_has_no_time_between_tokens(load: LoadMetrics, clock: Clock) -> None:
    begin(load, clock)
    tokens(load, 1, "stop")
    assert num(load.end_to_end_s) == 1
    assert num(load.per_output_token_s) == num(load.inter_token_s) == 0


def test_requests_are_queued_then_running_then_finished_once(
    load: LoadMetrics, clock: Clock
) -> None:
    for name in "abcd":
        begin(load, clock, name)
    assert (load.num_queued, load.num_running) == (4, 0)
    tokens(load, 2, request_id="a")
    tokens(load, 2, request_id="b")
    assert (load.num_queued, load.num_running) == (2, 2)
    tokens(load, 1, "stop", "a")
    load.abort("b")
    load.take(Output("c", finish_reason="error", error="the engine failed"))
    for name in "abc":
        load.abort(name)
        tokens(load, 1, "length", name)
    assert load.finished == {"stop": 1, "abort": 1, "error": 1}
    assert (load.num_queued, load.num_running) == (1, 0)
    assert num(load.end_to_end_s) == 1, "what did not end by itself has no length"


def test_a_request_that_was_refused_does_not_count(load: LoadMetrics, clock: Clock) -> None:
    load.begin([Submit("r", (1,), SamplingParams())], clock.now)
    load.take(Output("r", finish_reason="error", error="too long", error_kind="InvalidRequest"))
    load.begin([Submit("s", (1,), SamplingParams())], clock.now)
    load.abort("s")
    assert not load.finished
    assert load.num_queued == 0


def test_percentiles_weigh_and_forget(clock: Clock) -> None:
    recent = Recent(clock)
    assert recent.percentiles(0.5) == [None]
    recent.observe(9.0)
    clock.now += LATELY_S / 2
    recent.observe(1.0, 98)
    recent.observe(2.0)
    assert recent.percentiles(0.5, 0.98, 0.99, 1.0) == [1.0, 1.0, 2.0, 9.0]
    clock.now += LATELY_S / 2
    assert recent.percentiles(1.0) == [2.0]
    clock.now += LATELY_S
    assert recent.percentiles(1.0) == [None]


def test_the_rate_of_tokens_is_of_the_last_ten_seconds(load: LoadMetrics, clock: Clock) -> None:
    begin(load, clock)  # a second goes by
    tokens(load, 6)
    assert load.tokens_per_s() == 6
    clock.now += 1
    tokens(load, 2)
    tokens(load, 2)
    assert load.tokens_per_s() == 5
    clock.now += 8.5
    assert load.tokens_per_s() == pytest.approx(10 / LATELY_S)
    clock.now += 1
    assert load.tokens_per_s() == pytest.approx(4 / LATELY_S)
    clock.now += 1
    assert load.tokens_per_s() == 0
