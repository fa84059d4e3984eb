"""Predicted text in the engine: budgets, requests side by side, counts, the same answers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.prediction import PredictionDrafter
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request
from tests.drafters.simulated_answer import draft, first_path, request
from tests.toy import ALPHABET, EOS, run_all, toy_engine


def test_without_a_prediction_it_is_not_asked() -> None:
    requests = {name: Request(name, (1, 2, 3), SamplingParams(max_tokens=9)) for name in "ab"}
    told = Request("told", (1, 2, 3), SamplingParams(max_tokens=9), prediction_ids=(5, 6, 7))
    engine = toy_engine(drafter=PredictionDrafter(), node_budget=4)
    run_all(engine, list(requests.values()))
    assert not engine.drafter.num_steps
    run_all(engine, [told])
    assert engine.drafter.num_steps["prediction"]


def test_a_budget_of_zero_gives_the_root_and_later_steps_catch_up() -> None:
    drafter, req = PredictionDrafter(), request(range(50))
    for token_id in range(10):
        assert draft(drafter, req, 0).num_nodes == 1
        req.token_ids.append(token_id)
    assert first_path(draft(drafter, req, 4)) == [10, 11, 12, 13]


def test_requests_never_see_each_other_and_release_forgets() -> None:
    drafter = PredictionDrafter()
    first, second = request(range(50), "a"), request(range(100, 150), "b")
    first.token_ids += range(5)
    second.token_ids += range(100, 105)
    trees = drafter.draft([DecodeStep(first, 8), DecodeStep(second, 8)])
    assert first_path(trees[0]) == list(range(5, 13))
    assert first_path(trees[1]) == list(range(105, 113))
    drafter.release(first)
    drafter.release(first)  # as after an abort
    assert set(drafter._alignments) == {"b"}
    again = request(range(200, 250), "a")
    assert first_path(draft(drafter, again, 4)) == list(range(200, 204))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@given(
    seed=st.integers(0, 1000),
    edits=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 5), st.integers(0, 5)), max_size=4),
    node_budget=st.sampled_from([1, 5, 32]),
    penalty=st.sampled_from([0.0, 0.6]),
)
@settings(max_examples=10, deadline=None)
def test_no_prediction_changes_the_answer(
    temperature: float,
    seed: int,
    edits: list[tuple[int, int, int]],
    node_budget: int,
    penalty: float,
) -> None:
    """The prediction is the answer with random edits; two choices run side by side."""
    rng = random.Random(seed)
    params = [
        SamplingParams(
            max_tokens=40, temperature=temperature, seed=seed + i, frequency_penalty=penalty
        )
        for i in range(2)
    ]
    plain = [Request(f"r{i}", (1, 2, 3), each) for i, each in enumerate(params)]
    run_all(toy_engine(), plain)
    prediction = list(plain[0].output_ids)
    for place, num_old, num_new in edits:
        prediction[place : place + num_old] = rng.choices(range(len(ALPHABET)), k=num_new)
    drafted = [
        Request(f"r{i}", (1, 2, 3), each, prediction_ids=tuple(prediction))
        for i, each in enumerate(params)
    ]
    run_all(toy_engine(drafter=PredictionDrafter(), node_budget=node_budget), drafted)
    for alone, together in zip(plain, drafted, strict=True):
        assert together.output_ids == alone.output_ids
        assert together.finish_reason == alone.finish_reason
        assert set(together.stats.drafted_by_source) <= {"prediction"}


def test_the_prediction_is_counted_apart_from_other_drafts() -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    plain = Request("r", (1, 2, 3), params)
    run_all(toy_engine(), [plain])
    prediction = list(plain.output_ids)
    prediction[30:33] = [EOS, EOS]
    alone = Request("r", (1, 2, 3), params, prediction_ids=tuple(prediction))
    run_all(toy_engine(drafter=PredictionDrafter(), node_budget=16), [alone])
    stats = alone.stats
    assert alone.output_ids == plain.output_ids
    assert stats.accepted_by_source["prediction"] == stats.num_accepted > 40
    assert stats.drafted_by_source["prediction"] == stats.num_draft_tokens
    unrelated = Request("r", (1, 2, 3), params)
    run_all(toy_engine(drafter=PredictionDrafter(), node_budget=16), [unrelated])
    assert unrelated.stats.num_draft_tokens == 0


def test_the_ngram_drafter_makes_nothing_of_a_prediction() -> None:
    drafter, req = NgramDrafter(), request([1, 2, 3, 1, 2, 3, 1, 2, 3])
    drafter.admit(req)
    (tree,) = drafter.draft([DecodeStep(req, 8)])
    assert tree.num_nodes == 1
