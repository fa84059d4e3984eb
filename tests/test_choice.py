"""The choice: among all sets of nodes that are trees, the one with the greatest profit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.acceptance import Acceptance
from specdec.candidates import Candidates, Floats
from specdec.choice import LEAST_WORTH, Chooser, Stakes
from specdec.plan import DecodeStep, StepPlan
from specdec.tree import DraftTree
from tests.candidate_trees import (
    BOTH,
    ONE,
    TWO,
    chain_of,
    costs,
    plain_plan,
    plan_of,
    request,
    tree_of,
    trees,
)  # fmt: skip

ROUNDING = 1e-12  # sums of at most twelve terms below 12, in another order


def worths_of(plan: StepPlan, drafted: Sequence[DraftTree]) -> list[list[float]]:
    """P(accepted) of each node by a fresh Acceptance, factor by factor."""
    candidates = Candidates.of(drafted)
    expected = Acceptance().estimate(plan.decode_steps, candidates).tolist()
    starts = candidates.first.tolist()
    return [
        [
            float(np.prod([expected[start + step] for step in tree.path(node)[1:]]))
            for node in range(tree.num_nodes)
        ]
        for tree, start in zip(drafted, starts, strict=False)
    ]


def utility(speed: float, exponent: float) -> float:
    """Its slope at speed 1 is 1, and it is 0 there."""
    return log(speed) if exponent == 0.0 else (speed**exponent - 1.0) / exponent


def allowed_sets(step: DecodeStep, tree: DraftTree, worths: list[float]) -> Iterator[list[float]]:
    """The worths of every set of nodes that is a tree within the step's limits."""
    nodes = [
        node
        for node in range(1, tree.num_nodes)
        if tree.depths[node] <= step.max_depth and worths[node] > LEAST_WORTH
    ]
    for count in range(min(len(nodes), step.node_budget) + 1):
        for subset in combinations(nodes, count):
            if all(tree.parents[node] in (0, *subset) for node in subset):
                yield [worths[node] for node in subset]


@given(
    drafted=st.lists(trees(max_nodes=4), min_size=1, max_size=3).filter(
        lambda drafted: all(tree.num_nodes < 6 for tree in drafted)
    ),
    price=st.sampled_from((0.0, 50.0, 100.0, 1e6)) | st.floats(0.0, 1000.0),
    margin=st.sampled_from((1.0, 1.03)),
    exponent=st.sampled_from((1.0, 0.5, 0.0, -1.0)),
    room=st.integers(0, 12),
    data=st.data(),
)
def test_no_allowed_set_has_more_profit(
    drafted: list[DraftTree],
    price: float,
    margin: float,
    exponent: float,
    room: int,
    data: st.DataObject,
) -> None:
    """Whatever rows cost, in stairs or not, by any mean of speeds: compared with all sets."""
    limits = data.draw(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 4)),
            min_size=len(drafted),
            max_size=len(drafted),
        )
    )
    plan = plan_of(
        *(DecodeStep(request(f"r{i}"), *limits[i]) for i in range(len(drafted))), node_room=room
    )
    seconds = data.draw(costs(len(drafted) + 12))
    worths = worths_of(plan, drafted)

    def profit(sets: Sequence[Sequence[float]]) -> float:
        count = sum(len(own) for own in sets)
        extra = float(seconds[len(drafted) + count] - seconds[len(drafted)])
        return sum(utility(1.0 + sum(own), exponent) for own in sets) - margin * price * extra

    by_tree = [
        list(allowed_sets(*each)) for each in zip(plan.decode_steps, drafted, worths, strict=True)
    ]
    most = max(profit(sets) for sets in product(*by_tree) if sum(len(own) for own in sets) <= room)

    stakes = Stakes(seconds, price, margin, exponent)
    chosen = Chooser(Acceptance()).choose(plan, drafted, room, stakes)
    kept = [_worths_of_kept(*each) for each in zip(drafted, chosen.trees, worths, strict=True)]
    assert sum(map(len, kept)) == chosen.num_nodes <= room
    assert chosen.worth == pytest.approx(sum(map(sum, kept)), abs=ROUNDING)
    assert profit(kept) == pytest.approx(most, abs=ROUNDING * (1 + price))
    for step, tree in zip(plan.decode_steps, chosen.trees, strict=True):
        assert tree.num_nodes - 1 <= step.node_budget
        assert max(tree.depths) <= step.max_depth


@given(drafted=trees(max_nodes=6), exponent=st.sampled_from((1.0, 0.5, 0.0, -0.5, -1.0)))
def test_one_stream_is_as_fast_as_possible_whatever_the_exponent(
    drafted: DraftTree, exponent: float
) -> None:
    """Without costs more speed is better by any mean; where speed is dear, none is taken."""
    plan = plain_plan([drafted])
    free, dear = np.full(60, 0.01), np.linspace(0.01, 1.0, 60)
    chooser = Chooser(Acceptance())
    num_worth = sum(worth > LEAST_WORTH for worth in worths_of(plan, [drafted])[0][1:])
    assert chooser.choose(plan, [drafted], 50, Stakes(free, 100.0, 1.0, exponent)).num_nodes == (
        num_worth
    )
    assert chooser.choose(plan, [drafted], 50, Stakes(dear, 100.0, 1.0, exponent)).num_nodes == 0


def test_a_wide_stair_is_taken_whole_or_not_at_all() -> None:
    """Three rows at the price of one pay together where the first alone does not."""
    drafted = [chain_of(4, 0.5)]  # worth 0.55, 0.3, 0.17, 0.09
    seconds = np.array([1.0, 1.0, 2.0, 2.0, 2.0, 3.0])
    choose = Chooser(Acceptance()).choose
    assert choose(plain_plan(drafted), drafted, 4, Stakes(seconds, 0.9)).num_nodes == 3
    assert choose(plain_plan(drafted), drafted, 4, Stakes(seconds, 1.1)).num_nodes == 0
    assert choose(plain_plan(drafted), drafted, 1, Stakes(seconds, 0.9)).num_nodes == 0


def test_nodes_must_pay_with_a_margin() -> None:
    drafted = [chain_of(1, 0.5)]  # worth 0.55
    seconds = np.array([1.0, 1.0, 1.54])
    for margin, count in ((1.0, 1), (1.03, 0)):  # 0.54, 0.556
        stakes = Stakes(seconds, 1.0, margin)
        assert Chooser(Acceptance()).choose(plain_plan(drafted), drafted, 1, stakes).num_nodes == (
            count
        )


def test_requests_compete_for_rows() -> None:
    drafted = [chain_of(3, 0.05), chain_of(3, 0.95), chain_of(3, 0.5)]
    flat = np.full(13, 1.0)
    chosen = Chooser(Acceptance()).choose(plain_plan(drafted), drafted, 4, Stakes(flat, 1.0))
    assert [tree.num_nodes - 1 for tree in chosen.trees] == [0, 3, 1]


def test_of_equal_nodes_the_first_are_taken() -> None:
    drafted = [tree_of([0]), tree_of([0]), tree_of([0])]
    chosen = Chooser(Acceptance()).choose(plain_plan(drafted), drafted, 2, None)
    assert [tree.num_nodes - 1 for tree in chosen.trees] == [1, 1, 0]


def test_a_slow_stream_gains_more_by_the_harmonic_mean() -> None:
    """A token more is worth less to a stream that is fast: fewer nodes pay."""
    drafted = [chain_of(8, 0.95)]
    seconds = np.linspace(1.0, 2.0, 11)

    def num_nodes(exponent: float) -> int:
        stakes = Stakes(seconds, 1.5, 1.0, exponent)
        return Chooser(Acceptance()).choose(plain_plan(drafted), drafted, 8, stakes).num_nodes

    counts = [num_nodes(exponent) for exponent in (1.0, 0.0, -1.0)]
    assert counts == sorted(counts, reverse=True) and len(set(counts)) == 3


def test_the_harmonic_mean_shares_the_room() -> None:
    """All to the surer stream, or to both what makes both faster."""
    drafted = [chain_of(8, 0.98), chain_of(8, 0.5)]

    def sizes(exponent: float) -> list[int]:
        stakes = Stakes(np.ones(11), 1.0, 1.0, exponent)
        chosen = Chooser(Acceptance()).choose(plain_plan(drafted), drafted, 8, stakes)
        return [tree.num_nodes - 1 for tree in chosen.trees]

    assert sizes(1.0) == [8, 0]
    assert sizes(-1.0)[1] > 0


def test_without_stakes_the_likeliest_fill_the_room() -> None:
    drafted = [chain_of(3, 0.05), chain_of(3, 0.95)]
    chosen = Chooser(Acceptance()).choose(plain_plan(drafted), drafted, 4, None)
    assert [tree.num_nodes - 1 for tree in chosen.trees] == [1, 3]


def values_of(drafted: DraftTree, cheapest_first: tuple[int, ...]) -> tuple[Floats, Floats]:
    chooser = Chooser(Acceptance(), ["suffix", "medusa"])
    stakes = Stakes(np.linspace(1.0, 1.2, 21), 1.0, 1.0, 1.0, cheapest_first)
    chosen = chooser.choose(plain_plan([drafted]), [drafted], 10, stakes)
    assert chosen.num_nodes == drafted.num_nodes - 1
    return chosen.values[0], chosen.by_level


@pytest.mark.parametrize(("cheapest_first", "index"), [((0, 1), 0), ((1, 0), 1)])
def test_a_node_of_several_drafters_is_the_cheapest_ones(
    cheapest_first: tuple[int, ...], index: int
) -> None:
    values, _ = values_of(tree_of([0], None, [BOTH]), cheapest_first)
    assert values[index] > 0.0 and values[1 - index] == 0.0


def test_values_are_worths_beyond_their_price_by_drafter_and_level() -> None:
    drafted = tree_of([0, 0, 1], [0.95] * 3, [ONE, TWO, ONE])
    ((_, first, second, third),) = worths_of(plain_plan([drafted]), [drafted])
    values, by_level = values_of(drafted, (0, 1))
    assert values == pytest.approx([first + third - 0.02, second - 0.01], abs=ROUNDING)
    assert by_level[0, :3] == pytest.approx([first - 0.01, third - 0.01, 0.0], abs=ROUNDING)
    assert by_level[1, :3] == pytest.approx([second - 0.01, 0.0, 0.0], abs=ROUNDING)


def _worths_of_kept(tree: DraftTree, kept: DraftTree, worths: list[float]) -> list[float]:
    """Worths of a tree's nodes that were kept; nodes that look alike are worth alike or differ
    by their path, so each is looked up by what it and its ancestors are."""
    left = [(_signature(tree, node), worths[node]) for node in range(1, tree.num_nodes)]
    found = []
    for node in range(1, kept.num_nodes):
        wanted = _signature(kept, node)
        of_equal = max((worth for name, worth in left if name == wanted), default=None)
        assert of_equal is not None, "a node that nobody drafted"
        left.remove((wanted, of_equal))
        found.append(of_equal)
    return found


def _signature(tree: DraftTree, node: int) -> tuple[object, ...]:
    return tuple((tree.token_ids[n], tree.scores[n], tree.sources[n]) for n in tree.path(node)[1:])
