"""Acceptance: estimates become what is measured, for all requests and for one that differs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.acceptance import MEMORY, UNEXPECTED, Acceptance
from specdec.candidates import Candidates
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree
from tests.candidate_trees import (
    BAD_SCORES,
    BOTH,
    ONE,
    SCORES,
    TWO,
    chain_of,
    request,
    tree_of,
    trees,
)

WRONG = 99  # a token that no tree holds


def estimates(acceptance: Acceptance, asker: Request, tree: DraftTree) -> list[float]:
    """Of every node but the root."""
    expected = acceptance.estimate([DecodeStep(asker, 255)], Candidates.of([tree]))
    return [float(x) for x in expected[1:]]


def estimate(acceptance: Acceptance, tree: DraftTree, asker: str = "new") -> float:
    """The first node's, by default of a request that has no evidence of its own."""
    return estimates(acceptance, request(asker), tree)[0]


def learn(
    acceptance: Acceptance, asker: str, tree: DraftTree, tokens: Sequence[int]
) -> tuple[str, ...]:
    """One step of one request."""
    estimates(acceptance, request(asker), tree)
    return acceptance.observe([tokens])[0]


def deviation(rate: float) -> float:
    """Of a running mean over 200 observations, the memory of the last level: a twofold one's."""
    return sqrt(rate * (1.0 - rate) / (2.0 * MEMORY[2]))


def snapshot(acceptance: Acceptance) -> list[bytes]:
    counts = (acceptance.by_score, acceptance.by_kind, acceptance.by_cell)
    return [table.tobytes() for count in counts for table in (count.seen, count.right)] + [
        acceptance.cell_mean.tobytes(),
        acceptance.own.rows.tobytes(),
    ]


@pytest.mark.parametrize(
    ("name", "true_rate"),
    [
        ("overconfident", lambda score: score / 3),
        ("underconfident", lambda score: 1.0 - (1.0 - score) / 3),
        ("uninformative", lambda score: 0.4),
        ("calibrated", lambda score: score),
    ],
)
def test_estimates_become_the_true_rates(name: str, true_rate: Callable[[float], float]) -> None:
    """By claimed score, over many requests, whatever the claims are worth."""
    acceptance, rng = Acceptance(), random.Random(0)
    scores = (0.15, 0.45, 0.85)
    for step in range(1500):
        score = rng.choice(scores)
        came = 1 if rng.random() < true_rate(score) else WRONG
        learn(acceptance, f"r{step % 50}", chain_of(1, score), [came])
    for score in scores:
        rate = true_rate(score)
        assert abs(estimate(acceptance, chain_of(1, score)) - rate) < 5 * deviation(rate), name


def test_before_any_evidence_a_claim_is_believed() -> None:
    """To the middle of its bin."""
    for score, middle in ((0.0, 0.015), (0.45, 0.45), (0.55, 0.55), (1.0, 0.985)):
        assert estimate(Acceptance(), chain_of(1, score)) == pytest.approx(middle)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (tree_of([0]), tree_of([0, 1], [1.0, 0.5])),  # depth
        (tree_of([0]), tree_of([0, 0])),  # rank
    ],
)
def test_depths_and_ranks_are_told_apart(better: DraftTree, worse: DraftTree) -> None:
    """With the same drafter and the same claims, the first is right and the last never is."""
    acceptance = Acceptance()
    for step in range(200):
        learn(acceptance, f"r{step}", better, [1])
        learn(acceptance, f"r{step}", worse, [1, WRONG])
    assert estimates(acceptance, request("new"), better)[-1] > 0.9
    assert estimates(acceptance, request("new"), worse)[-1] < 0.1


def test_temperatures_are_told_apart() -> None:
    acceptance, tree = Acceptance(), chain_of(1)
    for step in range(200):
        for temperature, came in ((0.0, 1), (1.0, WRONG)):
            estimates(acceptance, request(f"{step} at {temperature}", temperature), tree)
            acceptance.observe([[came]])
    assert estimates(acceptance, request("cold"), tree)[0] > 0.9
    assert estimates(acceptance, request("hot", 1.0), tree)[0] < 0.1


def test_agreement_is_told_apart() -> None:
    """What two drafters guess is right nine times in ten, what one guesses four times."""
    acceptance, rng = Acceptance(), random.Random(0)
    for step in range(1500):
        sources, rate = rng.choice(((ONE, 0.4), (TWO, 0.4), (BOTH, 0.9)))
        came = 1 if rng.random() < rate else WRONG
        learn(acceptance, f"r{step % 50}", tree_of([0], None, [sources]), [came])
    for sources, rate in ((ONE, 0.4), (TWO, 0.4), (BOTH, 0.9)):
        found = estimate(acceptance, tree_of([0], None, [sources]))
        assert abs(found - rate) < 5 * deviation(rate)


def test_only_children_of_reached_nodes_are_evidence() -> None:
    """What lies below a rejected node, or below one after which nothing came, changes nothing."""
    first, second = Acceptance(), Acceptance()
    tree = tree_of([0, 0, 1, 3], [0.5, 0.3, 0.7, 0.9])
    learn(first, "r", tree, [WRONG])
    learn(second, "r", tree_of([0, 0], [0.5, 0.3]), [WRONG])
    assert snapshot(first) == snapshot(second)
    learn(first, "r", tree, [1])
    learn(second, "r", tree_of([0, 0], [0.5, 0.3]), [1])
    assert snapshot(first) == snapshot(second)
    learn(first, "r", tree, [1, WRONG])
    learn(second, "r", tree_of([0, 0, 1], [0.5, 0.3, 0.7]), [1, WRONG])
    assert snapshot(first) == snapshot(second)


def test_every_drafted_child_of_a_reached_node_is_evidence() -> None:
    """Verified or not: the tokens alone say which were right."""
    acceptance = Acceptance()
    learn(acceptance, "r", tree_of([0, 0, 0, 2]), [2, 4, WRONG])
    assert acceptance.by_score.seen.sum() == 4
    assert acceptance.by_score.right.sum() == 2


def test_where_nothing_came_nothing_is_learned() -> None:
    acceptance = Acceptance()
    estimates(acceptance, request("r"), chain_of(3))
    before = snapshot(acceptance)
    assert acceptance.observe([[]]) == [()]
    assert snapshot(acceptance) == before


def test_an_estimate_is_judged_once() -> None:
    acceptance = Acceptance()
    assert acceptance.observe([[1]]) == []
    learn(acceptance, "r", chain_of(1), [1])
    before = snapshot(acceptance)
    assert acceptance.observe([[1]]) == []
    assert snapshot(acceptance) == before


def test_trees_of_a_step_are_judged_each_by_its_own_tokens() -> None:
    """As if one after the other; all of a step's estimates are made before any is judged."""
    acceptance = Acceptance()
    steps = [DecodeStep(request("good"), 255), DecodeStep(request("bad"), 255)]
    for _ in range(30):
        acceptance.estimate(steps, Candidates.of([chain_of(2), chain_of(2)]))
        acceptance.observe([[1, 2, WRONG], [WRONG]])
    assert estimate(acceptance, chain_of(1), "good") > 0.7
    assert estimate(acceptance, chain_of(1), "bad") < 0.3


@pytest.mark.parametrize(("odd_rate", "common_rate"), [(0.2, 0.8), (0.8, 0.2)])
def test_a_request_that_differs_is_corrected_for_itself_alone(
    odd_rate: float, common_rate: float
) -> None:
    """One among twenty: nearer to its own rate than to the others', whose estimate stays theirs."""
    acceptance, rng, tree = Acceptance(), random.Random(0), chain_of(1)
    for _ in range(60):
        for name in (f"r{i}" for i in range(20)):
            rate = odd_rate if name == "r0" else common_rate
            learn(acceptance, name, tree, [1 if rng.random() < rate else WRONG])
    mixed = common_rate + (odd_rate - common_rate) / 20
    odd = estimate(acceptance, tree, "r0")
    assert abs(odd - odd_rate) < abs(odd - common_rate)
    assert abs(estimate(acceptance, tree) - mixed) < 5 * deviation(mixed)


@pytest.mark.parametrize("is_right_first", [True, False])
def test_a_sudden_change_is_followed_within_twenty_steps(is_right_first: bool) -> None:
    """All right becomes all wrong or the other way, for one request while the others go on."""
    acceptance, tree = Acceptance(), chain_of(1)

    def step(is_right: bool) -> None:
        learn(acceptance, "changing", tree, [1 if is_right else WRONG])
        for i in range(10):
            learn(acceptance, f"r{i}", tree, [1 if is_right_first else WRONG])

    for _ in range(60):
        step(is_right_first)
    for _ in range(20):
        step(not is_right_first)
    found = estimate(acceptance, tree, "changing")
    assert found < 0.25 if is_right_first else found > 0.75


def test_old_evidence_is_forgotten() -> None:
    """After thrice what a cell remembers, a twentieth of the past is left, e^-3."""
    acceptance, tree = Acceptance(), chain_of(1)
    for step in range(2000):
        learn(acceptance, f"r{step}", tree, [1])
    assert estimate(acceptance, tree) > 0.95
    for step in range(3 * int(MEMORY[2])):
        learn(acceptance, f"s{step}", tree, [WRONG])
    assert estimate(acceptance, tree) < 0.1
    seen = [counts.seen.max() for counts in (acceptance.by_score, acceptance.by_kind)]
    assert seen == list(MEMORY[:2]) and acceptance.by_cell.seen.max() == MEMORY[2]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_released_request_leaves_nothing_of_its_own(is_right: bool) -> None:
    """Be it better than the others or worse."""
    acceptance, tree = Acceptance(), chain_of(1)
    for step in range(60):
        learn(acceptance, "odd", tree, [1 if is_right else WRONG])
        learn(acceptance, f"r{step}", tree, [WRONG if is_right else 1])
    common = estimate(acceptance, tree)
    assert abs(estimate(acceptance, tree, "odd") - common) > 0.25
    acceptance.release("odd")
    acceptance.release("never seen")
    assert estimate(acceptance, tree, "odd") == common


def test_many_requests_at_once_keep_their_own_counts() -> None:
    """More than there was room for at first, some of them released in between."""
    acceptance, tree = Acceptance(), chain_of(1)
    for step in range(60):
        for i in range(40):
            learn(acceptance, f"r{i}", tree, [1 if i % 2 else WRONG])
        acceptance.release(f"r{20 + step % 20}")
    for i in range(20):
        assert (estimate(acceptance, tree, f"r{i}") > 0.5) == (i % 2 == 1)


def test_a_right_guess_that_nobody_expected_is_told() -> None:
    acceptance = Acceptance()
    tree = tree_of([0, 0, 1], [0.95, 0.05, 0.05], [ONE, TWO, TWO])
    assert estimates(acceptance, request("r"), tree)[1] < UNEXPECTED
    assert acceptance.observe([[2]]) == [TWO]
    assert learn(acceptance, "r", tree, [1, 3]) == ()  # expected, and only the first token counts
    assert learn(acceptance, "r", tree, [WRONG]) == ()


@given(data=st.data())
def test_estimates_are_probabilities_whatever_is_claimed(data: st.DataObject) -> None:
    acceptance = Acceptance()
    asker = request("r")
    for _ in range(data.draw(st.integers(1, 5))):
        tree = data.draw(trees(scores=SCORES + BAD_SCORES))
        found = np.array(estimates(acceptance, asker, tree))
        assert ((found > 0.0) & (found < 1.0)).all()
        path = tree.path(data.draw(st.integers(0, tree.num_nodes - 1)))[1:]
        acceptance.observe([[*(tree.token_ids[node] for node in path), WRONG]])


@pytest.mark.parametrize(
    ("claim", "counts_as"),
    [(float("nan"), 0.0), (-3.0, 0.0), (float("-inf"), 0.0), (2.0, 1.0), (float("inf"), 1.0)],
)
def test_a_claim_that_is_no_probability_counts_as_the_nearest(
    claim: float, counts_as: float
) -> None:
    found = estimate(Acceptance(), chain_of(1, claim))
    assert found == estimate(Acceptance(), chain_of(1, counts_as))


def test_the_table_for_people() -> None:
    acceptance = Acceptance()
    for _ in range(4):
        learn(acceptance, "r", tree_of([0, 1], [0.55, 0.15], [BOTH, ONE]), [1, WRONG])
    assert acceptance.as_table() == [
        {
            "drafter": "suffix",
            "score": "0.1-0.2",
            "claimed": 0.15,
            "measured": 0.0,
            "evidence": 4.0,
        },
        {
            "drafter": "suffix + medusa",
            "score": "0.5-0.6",
            "claimed": 0.55,
            "measured": 1.0,
            "evidence": 4.0,
        },
    ]
