"""Predicted text: the answer's place in it after any edit, and what drafts from it are worth."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafters.alignment import Alignment, PredictedText
from specdec.drafters.prediction import PredictionDrafter
from tests.drafters.simulated_answer import (
    FOREIGN,
    accept,
    as_tokens,
    draft,
    first_path,
    request,
    simulate,
)

# --- where the answer stands ---


@st.composite
def single_edits(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(length of a text of unique tokens, place of the edit, tokens removed, tokens inserted)."""
    length = draw(st.integers(3, 700))
    place = draw(st.integers(0, length - 3))
    num_old = draw(st.integers(0, length - 3 - place))
    return length, place, num_old, draw(st.integers(0, 300))


@given(single_edits())
@settings(deadline=None)
def test_three_tokens_after_any_edit_the_place_is_right(edit: tuple[int, int, int, int]) -> None:
    length, place, num_old, num_new = edit
    alignment = Alignment(PredictedText(range(length)))
    for token_id in [*range(place), *range(FOREIGN, FOREIGN + num_new)]:
        alignment.advance(token_id)
    behind = place + num_old
    for num_followed in (1, 2, 3):
        alignment.advance(behind + num_followed - 1)
    assert alignment.place == behind + 3


@given(st.integers(200, 700), st.integers(0, 100), st.integers(0, 80), st.integers(0, 20))
@settings(deadline=None)
def test_in_the_neighbourhood_two_tokens_are_enough(
    length: int, place: int, num_old: int, num_new: int
) -> None:
    """By the weights: 0.9 * share**2 of what is lost stays so, with a share of 1.5 / (length + 50);
    0.09 * 0.12 * 81**-1.2 * 0.75 goes to a place 80 tokens ahead: more, from 200 tokens on.
    """
    alignment = Alignment(PredictedText(range(length)))
    behind = place + num_old
    for token_id in [*range(place), *range(FOREIGN, FOREIGN + num_new), behind, behind + 1]:
        alignment.advance(token_id)
    assert alignment.place == behind + 2


@given(single_edits(), st.integers(1, 12))
@settings(deadline=None, max_examples=50)
def test_drafts_go_on_behind_any_edit(edit: tuple[int, int, int, int], node_budget: int) -> None:
    length, place, num_old, num_new = edit
    rest = list(range(place + num_old, length))
    req = request(range(length))
    req.token_ids += [*range(place), *range(FOREIGN, FOREIGN + num_new), *rest[:3]]
    assert first_path(draft(PredictionDrafter(), req, node_budget)) == rest[3 : 3 + node_budget]


@given(
    prediction=st.lists(st.integers(0, 3), max_size=30),
    answer=st.lists(st.integers(0, 4), max_size=60),
    node_budget=st.integers(1, 20),
)
@settings(deadline=None)
def test_scores_are_probabilities_whatever_the_texts(
    prediction: list[int], answer: list[int], node_budget: int
) -> None:
    drafter, req = PredictionDrafter(), request(prediction)
    for token_id in answer:
        tree = draft(drafter, req, node_budget)
        for kids in tree.children:
            scores = [tree.scores[kid] for kid in kids]
            assert all(0 < score <= 1 for score in scores)
            assert sum(scores) <= 1 + 1e-9  # rounding of at most eight weights
            assert scores == sorted(scores, reverse=True)
        assert set(tree.sources[1:]) <= {("prediction",)}
        req.token_ids.append(token_id)


def test_a_text_that_is_followed_is_drafted_as_a_chain_with_high_scores() -> None:
    req = request(range(100))
    drafter = PredictionDrafter()
    assert first_path(draft(drafter, req, 8)) == list(range(8)), "it may begin at once"
    req.token_ids += range(20)
    tree = draft(drafter, req, 32)
    assert tree.is_chain
    assert tree.token_ids[1:] == tuple(range(20, 52))
    assert min(tree.scores[1:]) > 0.9


def test_after_a_departure_the_tree_holds_several_ways_on() -> None:
    """One foreign token was written in place of token 10: was it inserted, or did it replace?"""
    req = request(range(100))
    req.token_ids += [*range(10), FOREIGN]
    tree = draft(PredictionDrafter(), req, 32)
    starts = {tree.token_ids[kid]: tree.scores[kid] for kid in tree.children[0]}
    assert {10, 11} <= set(starts)
    assert max(starts.values()) < 0.5
    inserted, replaced = [*range(10, 100)], [*range(11, 100)]
    assert min(len(accept(tree, inserted)), len(accept(tree, replaced))) >= 3


def test_a_preamble_is_an_insertion() -> None:
    answer = [*range(FOREIGN, FOREIGN + 15), *range(200)]
    run = simulate(range(200), answer, 32)
    assert len(run.steps) <= 15 + 1 + -(-200 // 33)  # a step each, one to rejoin, then full trees


def test_blocks_in_another_order_are_found_again() -> None:
    blocks = [list(range(start, start + 60)) for start in (0, 60, 120, 180)]
    answer = [token_id for index in (2, 0, 3, 1) for token_id in blocks[index]]
    run = simulate(range(240), answer, 32)
    # Per block: at most three steps to be found again, two full trees, one to leave it.
    assert len(run.steps) <= 4 * 6
    assert run.tokens_per_step >= 10


def test_what_was_replaced_before_is_drafted_in_place_of_the_old() -> None:
    """A name of two tokens that becomes one of three, every 15 tokens; guessed from the fourth."""
    prediction, answer = [], []
    for start in range(100, 280, 15):
        prediction += [7, 8, *range(start, start + 13)]
        answer += [50, 51, 52, *range(start, start + 13)]
    run = simulate(prediction, answer, 32)
    known = run.steps.index(max(run.steps))
    assert sum(run.steps[:known]) <= 4 * 16
    assert all(step >= 16 for step in run.steps[known:-1])


def test_an_answer_that_has_nothing_of_the_prediction_is_hardly_drafted() -> None:
    run = simulate(range(500), range(FOREIGN, FOREIGN + 500), 32)
    assert run.num_nodes < 2 * 500  # of 32 * 500
    late = simulate(range(500), [*range(FOREIGN, FOREIGN + 500), *range(100)], 32)
    assert len(late.steps) < 510, "and yet it is followed once it comes"


# --- what it is worth ---

TEXT = (Path(__file__).parents[2] / "specdec" / "scheduler.py").read_text()


def nearly_predicted(seed: int) -> tuple[list[int], list[int]]:
    """400 tokens of code, and an answer of which 95 % are these, with three edits."""
    ids: dict[str, int] = {}
    prediction = as_tokens(TEXT, ids)[:400]
    rng = random.Random(seed)
    others = as_tokens((Path(__file__).parents[2] / "README.md").read_text(), ids)
    answer, num_new = list(prediction), 7  # 3 x 7 tokens are 5 % of 400
    for third, num_old in zip((2, 1, 0), rng.sample([0, num_new, 3 * num_new], 3), strict=True):
        place = 20 + 120 * third + rng.randrange(80)
        start = rng.randrange(len(others) - num_new)
        answer[place : place + num_old] = others[start : start + num_new]
    return prediction, answer


@pytest.mark.parametrize("seed", range(10))
def test_eight_tokens_per_step_where_95_percent_are_predicted(seed: int) -> None:
    prediction, answer = nearly_predicted(seed)
    assert simulate(prediction, answer, 32).tokens_per_step >= 8


class Counted(tuple[int, ...]):
    """Counts the elements that are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        result = super().__getitem__(key)
        Counted.num_read += len(result) if isinstance(key, slice) else 1
        return result

    def __iter__(self) -> Iterator[int]:
        Counted.num_read += len(self)
        return super().__iter__()


def test_cost_of_a_step_does_not_grow_with_the_prediction() -> None:
    """Counted, not timed: 50 times the text, the same reads, following and lost."""
    costs = []
    for length in (1_000, 50_000):
        prediction = [i % 97 for i in range(length)]
        drafter, req = PredictionDrafter(), request(prediction)
        req.token_ids += prediction[:200]
        draft(drafter, req, 32)
        text = drafter._alignments["r"].text
        text.token_ids = Counted(text.token_ids)
        for index in (text._places, text._grams):
            places: dict[Any, Any] = index
            places.update({key: Counted(found) for key, found in places.items()})
        reads = []
        for news in (prediction[200:210], [FOREIGN], [5, 9, 2], prediction[300:304]):
            req.token_ids += news
            Counted.num_read = 0
            draft(drafter, req, 32)
            reads.append(Counted.num_read)
        costs.append(reads)
    # A look-up bisects a token's places: 515 of them instead of 10 take 6 more reads. The weights
    # differ a little with the text's length, and with them which nodes are chosen.
    for short, long in zip(*costs, strict=True):
        assert 0 < long <= 1.5 * short + 3 * 6 * 10
