"""Step costs: the curve they start from, what moves them and what does not, in virtual time"""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.cost_table import CONTEXTS
from specdec.cuda_graphs import row_bucket
from specdec.decision import StepTimes
from specdec.step_cost import PerUnit, Steady, StepCost


def affine(num_requests: int, context: int, num_rows: int) -> float:
    """A CPU's forward in seconds."""
    return 9e-3 + 4e-4 * num_rows + 1e-8 * num_requests * context


def make_cost(**settings: Any) -> StepCost:
    return StepCost.of(affine, **{"max_rows": 64, "max_requests": 16, **settings})


def step(
    cost: StepCost,
    num_rows: int,
    seconds: float,
    *,
    num_requests: int = 1,
    context: int = 512,
    num_prefill: int = 0,
    rest_s: float = 0.0,
    draft_s: dict[str, float] | None = None,
    num_asked: dict[str, int] | None = None,
) -> None:
    cost.observe(
        num_requests=num_requests,
        context=context,
        num_rows=num_rows,
        num_prefill=num_prefill,
        times=StepTimes(seconds, rest_s, draft_s or {}, num_asked or {}),
    )


def run(cost: StepCost, num_steps: int, rows: list[int], seconds: Callable[[int], float]) -> None:
    """Steps with these numbers of rows in turn, one request, context 512."""
    for index in range(num_steps):
        num_rows = rows[index % len(rows)]
        step(cost, num_rows, seconds(num_rows))


def alone(num_rows: int) -> float:
    return affine(1, 512, num_rows)


def forward_s(cost: StepCost, num_rows: int) -> float:
    return float(cost.forward_s(1, 512, 64)[num_rows])


# The curve at the start.


@pytest.mark.parametrize("num_requests", [1, 3, 8, 16])
@pytest.mark.parametrize("context", [512, 700, 8192, 100_000])
def test_an_affine_machine_is_read_between_the_points(num_requests: int, context: int) -> None:
    found = make_cost().forward_s(num_requests, context, 150)  # beyond the last point too
    assert found.shape == (151,)
    rows = np.arange(num_requests, 151)
    expected = [affine(num_requests, context, int(r)) for r in rows]
    assert found[num_requests:] == pytest.approx(expected, rel=1e-12)
    assert (found[:num_requests] == found[num_requests]).all()


def test_fewer_rows_than_requests_are_asked_for() -> None:
    found = make_cost().forward_s(8, 512, 3)
    assert found.tolist() == [pytest.approx(affine(8, 512, 8))] * 4


def test_a_staircase_costs_what_its_bucket_costs() -> None:
    found = make_cost(is_staircase=True).forward_s(1, 512, 64)
    assert found[1:] == pytest.approx([alone(row_bucket(r)) for r in range(1, 65)])
    pinned = make_cost(is_staircase=True, row_multiple=64, max_rows=300).forward_s(1, 512, 320)
    assert pinned[1:] == pytest.approx([alone(row_bucket(r, 64)) for r in range(1, 321)])


def test_short_contexts_cost_as_the_first_point() -> None:
    cost = make_cost()
    assert (cost.forward_s(1, 3, 20) == cost.forward_s(1, CONTEXTS[0], 20)).all()


def test_a_curve_that_falls_is_taken_to_be_level() -> None:
    cost = StepCost.of(lambda n, c, r: 1 / r, max_rows=8, max_requests=1)
    assert (cost.forward_s(1, 512, 8) == 1).all()


def test_a_vector_is_kept_until_something_is_learned_and_cannot_be_written() -> None:
    cost = make_cost()
    first = cost.forward_s(1, 512, 20)
    assert cost.forward_s(1, 512, 20) is first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1.0
    step(cost, 4, 1.0)
    assert cost.forward_s(1, 512, 20) is not first


# What moves it.


def test_one_slow_step_moves_nothing() -> None:
    cost = make_cost()
    run(cost, 20, [1, 8], alone)
    step(cost, 8, 50 * alone(8))
    run(cost, 5, [8, 1], alone)
    expected = [alone(r) for r in range(1, 65)]
    assert cost.forward_s(1, 512, 64)[1:] == pytest.approx(expected, rel=1e-9)


def test_every_third_step_being_slow_moves_nothing() -> None:
    cost = make_cost()
    for index in range(120):
        num_rows = (1, 4)[index % 2]
        step(cost, num_rows, alone(num_rows) * (50 if index % 3 == 0 else 1))
    assert cost.forward_s(1, 512, 64)[4] == pytest.approx(alone(4), rel=1e-9)


@pytest.mark.parametrize("rows", [[1], [1, 8, 16]])
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_machine_that_changes_for_good_is_followed(rows: list[int], factor: float) -> None:
    cost = make_cost()
    run(cost, 150, rows, alone)
    run(cost, 50, rows, lambda r: factor * alone(r))
    # A place visited every third step has 16 visits in memory, hence a trust of 0.76: after 47
    # steps (the median lags by three) 0.924 ** 47 = 2.5 % of the logarithm are left to the scale.
    for num_rows in (1, 4, 16, 64):  # at rows where no step has been, too
        assert forward_s(cost, num_rows) == pytest.approx(factor * alone(num_rows), rel=0.04)


def test_a_change_of_scale_is_not_taken_for_one_of_shape() -> None:
    cost = make_cost()
    run(cost, 150, [1, 8, 16], alone)
    run(cost, 50, [1], lambda r: 2 * alone(r))
    # What the place took while the scale lagged it gives back, less what its rate fell meanwhile;
    # kept, it would be a fifth.
    assert forward_s(cost, 16) == pytest.approx(2 * alone(16), rel=0.1)


def test_a_start_that_is_off_is_followed_from_one_place() -> None:
    cost = make_cost()
    run(cost, 100, [1], lambda r: 1.5 * alone(r))
    assert forward_s(cost, 1) == pytest.approx(1.5 * alone(1), rel=0.02)
    # What is learned for other contexts at once, three quarters at least, holds for other rows.
    assert forward_s(cost, 16) > 1.5**0.75 * alone(16)


def bent(num_rows: int) -> float:
    return alone(num_rows) * (2 if num_rows >= 12 else 1)


@pytest.mark.parametrize(
    "rows", [[1, 16], [1] * 31 + [16], [16] * 15 + [1]], ids=["mix", "probes", "few plain"]
)
def test_a_change_of_shape_is_followed_where_steps_are(rows: list[int]) -> None:
    cost = make_cost()
    run(cost, 128, rows, alone)
    assert forward_s(cost, 16) / forward_s(cost, 1) == pytest.approx(alone(16) / alone(1), rel=0.01)
    run(cost, 512, rows, bent)
    # The rarer place is visited 16 times or more; a fifth of what is left goes each time.
    assert forward_s(cost, 16) / forward_s(cost, 1) == pytest.approx(bent(16) / bent(1), rel=0.1)


def test_long_phases_at_one_place_teach_the_shape_too() -> None:
    cost = make_cost()
    for rows in ([1], [16], [1], [16]):
        run(cost, 100, rows, bent)
    assert forward_s(cost, 16) == pytest.approx(bent(16), rel=0.02)
    error = forward_s(cost, 16) / forward_s(cost, 1) / (bent(16) / bent(1))
    assert 1 / math.sqrt(2) < error < math.sqrt(2)  # more than half of the 2 was learned


def test_rows_between_two_points_teach_both() -> None:
    cost = make_cost()
    run(cost, 100, [1, 6], lambda r: alone(r) * (1.3 if r == 6 else 1))
    assert forward_s(cost, 6) / forward_s(cost, 1) == pytest.approx(
        1.3 * alone(6) / alone(1), rel=0.03
    )
    assert forward_s(cost, 4) / alone(4) == pytest.approx(forward_s(cost, 8) / alone(8))


def test_what_rows_cost_is_known_in_new_contexts_and_batches() -> None:
    cost = make_cost()
    run(cost, 300, [1, 16], bent)
    # Of the shape's factor 2 three quarters of the logarithm hold everywhere.
    known = forward_s(cost, 16) / alone(16)
    for num_requests, context in ((1, 20_000), (4, 512)):
        factor = cost.forward_s(num_requests, context, 16)[16] / affine(num_requests, context, 16)
        assert known / 2**0.25 < factor <= 1.001 * known


def test_contexts_may_differ_in_what_rows_cost() -> None:
    cost = make_cost()
    for index in range(1000):
        context = (512, 8192)[index // 2 % 2]
        factor = 1.5 if (context, index % 2) == (8192, 1) else 1.0
        num_rows = (1, 16)[index % 2]
        step(cost, num_rows, factor * affine(1, context, num_rows), context=context)
    ratios = [
        float(found[16] / found[1]) / (affine(1, context, 16) / affine(1, context, 1))
        for context in (512, 8192)
        for found in [cost.forward_s(1, context, 16)]
    ]
    assert ratios == pytest.approx([1.0, 1.5], rel=0.05)


# Prefill.


def test_prefill_is_learned_and_leaves_decoding_alone() -> None:
    cost = make_cost()
    run(cost, 10, [1, 4], alone)
    before = cost.forward_s(1, 512, 64)
    for _ in range(30):
        step(cost, 4, alone(4) + 64 * 2e-3, num_prefill=64)
    assert (cost.forward_s(1, 512, 64) == before).all()
    assert cost.prefill_s(64) == pytest.approx(64 * 2e-3)
    assert cost.prefill_s(200) == pytest.approx(200 * 2e-3)
    step(cost, 4, 100.0, num_prefill=64)
    assert cost.prefill_s(64) == pytest.approx(64 * 2e-3)


def test_prefill_before_any_is_what_as_many_rows_cost() -> None:
    cost = make_cost()
    assert cost.prefill_s(0) == 0.0
    assert cost.prefill_s(32) == pytest.approx(32 * 4e-4)
    stairs = make_cost(is_staircase=True, row_multiple=64)
    assert stairs.prefill_s(8) > 0


def test_a_step_of_prefill_alone_reads_the_weights_too() -> None:
    cost = make_cost()
    step(cost, 0, affine(1, CONTEXTS[0], 1) + 0.02, num_requests=0, context=0, num_prefill=40)
    assert cost.prefill_s(40) == pytest.approx(0.02)


# Drafters and the rest.


def test_asking_is_learned_by_the_number_asked() -> None:
    cost = make_cost()
    assert cost.ask_s("suffix", 1) == 0.0
    for _ in range(10):
        step(cost, 1, alone(1), draft_s={"suffix": 2e-4}, num_asked={"suffix": 4})
    assert cost.ask_s("suffix", 4) == pytest.approx(2e-4)
    assert cost.ask_s("suffix", 8) == pytest.approx(4e-4)  # never measured: by the number asked
    step(cost, 1, alone(1), draft_s={"suffix": 3e-4}, num_asked={"suffix": 8})
    assert cost.ask_s("suffix", 8) == pytest.approx(3e-4)
    assert cost.ask_s("suffix", 4) == pytest.approx(2e-4)
    step(cost, 1, alone(1), draft_s={"suffix": 1.0}, num_asked={"suffix": 4})
    assert cost.ask_s("suffix", 4) == pytest.approx(2e-4)
    assert cost.ask_s("medusa", 4) == cost.ask_s("suffix", 0) == 0.0


def test_a_drafter_that_was_not_asked_teaches_nothing() -> None:
    cost = make_cost()
    step(cost, 1, alone(1), draft_s={"suffix": 1e-6}, num_asked={"suffix": 0})
    assert cost.ask_s("suffix", 1) == 0.0


def test_the_rest_of_a_step() -> None:
    cost = make_cost()
    assert cost.rest_s == 0.0
    for rest_s in (1e-3, 1e-3, 0.5, 1e-3, 1e-3, 1e-3):
        step(cost, 1, alone(1), rest_s=rest_s)
    assert cost.rest_s == pytest.approx(1e-3)


def test_steady_follows_what_lasts() -> None:
    steady = Steady()
    for value in [1.0] * 10 + [3.0] * 40:
        steady.observe(value)
    assert steady.value == pytest.approx(3.0, abs=2 * 0.9**37)
    assert PerUnit().seconds(1) is None
    own = PerUnit()
    own.observe(2, 2.0)
    own.observe(4, 40.0)
    assert [own.seconds(count) for count in (1, 2, 3, 4, 5)] == [1.0, 2.0, 30.0, 40.0, 50.0]


# Whatever is observed.

any_time = st.one_of(
    st.floats(), st.floats(1e-12, 1e12), st.sampled_from([0.0, -1.0, math.nan, math.inf])
)
any_step = st.tuples(
    st.integers(0, 40), st.integers(0, 300_000), st.integers(0, 200), st.integers(0, 64), any_time
)


@given(st.booleans(), st.lists(st.tuples(any_step, st.integers(1, 30)), max_size=12))
def test_costs_stay_positive_finite_and_monotone(
    is_staircase: bool, observed: list[tuple[tuple[int, int, int, int, float], int]]
) -> None:
    cost = make_cost(is_staircase=is_staircase)
    for (num_requests, context, num_rows, num_prefill, seconds), repeats in observed:
        for _ in range(repeats):
            step(
                cost,
                num_rows,
                seconds,
                num_requests=num_requests,
                context=context,
                num_prefill=num_prefill,
                rest_s=seconds,
                draft_s={"suffix": seconds},
                num_asked={"suffix": num_requests},
            )
    for num_requests, context in ((1, 0), (1, 512), (5, 3000), (40, 300_000)):
        found = cost.forward_s(num_requests, context, 200)
        assert np.isfinite(found).all()
        assert (found > 0).all()
        assert (np.diff(found) >= 0).all()
    for other in (cost.rest_s, cost.ask_s("suffix", 3), cost.prefill_s(30)):
        assert math.isfinite(other)
        assert other >= 0
    json.dumps(cost.curve(), allow_nan=False)


def test_what_is_known_reads_well() -> None:
    cost = make_cost()
    run(cost, 40, [1, 4], lambda r: 2 * alone(r))
    step(
        cost, 8, 0.02, num_requests=4, rest_s=1e-3, draft_s={"ngram": 1e-4}, num_asked={"ngram": 1}
    )
    shown = cost.curve()
    known = [(f["requests"], f["context"]) for f in shown["forwards"]]
    assert known == [(1, CONTEXTS[0]), (1, 512), (4, 512)]
    assert shown["ask_1_ms"] == {"ngram": 0.1}
    assert shown["forwards"][1]["rows_ms"]["1"] == pytest.approx(forward_s(cost, 1) * 1e3, abs=1e-4)
