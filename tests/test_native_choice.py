"""The native library chooses and learns as numpy does, to the last bit."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import native_choice
from specdec.acceptance import MEMORY, Acceptance
from specdec.asking import NUM_LEVELS
from specdec.choice import Choice, Chooser, Stakes
from specdec.counts import MAX_SOURCES
from specdec.kernels import native_library
from specdec.native_choice import NativeChooser, make_chooser, use_native
from specdec.plan import DecodeStep, StepPlan
from specdec.request import Request
from specdec.tree import DraftTree
from tests.candidate_trees import (
    BAD_SCORES,
    BOTH,
    ONE,
    SCORES,
    TWO,
    chain_of,
    costs,
    plain_plan,
    plan_of,
    request,
    tree_of,
    trees,
)
from tests.toy import compiled_native

DRAFTERS = ("suffix", "medusa")
REQUESTS = [request(f"r{i}", temperature) for i, temperature in enumerate((0.0, 0.5, 1.0, 0.0))]
FLAT = np.full(5000, 1.0)


@pytest.fixture(scope="module", autouse=True)
def library() -> ctypes.CDLL:
    """The native library, compiled before anything is timed."""
    try:
        return native_library.load(compiled_native())
    except native_library.NativeUnavailable as reason:
        pytest.skip(str(reason))


class Pair:
    """Both forms, told the same; whatever they answer or remember must be equal."""

    def __init__(self, drafters: Sequence[str] = DRAFTERS) -> None:
        self.plain = Chooser(Acceptance(), drafters)
        self.native = NativeChooser(Acceptance(), drafters, native_library.load(compiled_native()))

    def choose(
        self, plan: StepPlan, drafted: Sequence[DraftTree], room: int, stakes: Stakes | None
    ) -> Choice:
        plain = self.plain.choose(plan, drafted, room, stakes)
        native = self.native.choose(plan, drafted, room, stakes)
        assert native.trees == plain.trees
        assert native.num_nodes == plain.num_nodes
        assert native.worth == plain.worth
        assert native.deepest == plain.deepest
        np.testing.assert_array_equal(native.values[: len(drafted)], plain.values)
        np.testing.assert_array_equal(native.by_level, plain.by_level)
        return plain

    def observe(self, tokens: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
        surprises = self.plain.observe(tokens)
        assert self.native.observe(tokens) == surprises
        for plain, native in zip(
            _tables(self.plain.acceptance), _tables(self.native.acceptance), strict=True
        ):
            np.testing.assert_array_equal(native, plain)
        return surprises

    def release(self, request: Request) -> None:
        self.plain.acceptance.release(request.request_id)
        self.native.acceptance.release(request.request_id)


@given(data=st.data(), exponent=st.sampled_from((1.0, 1.0, 0.5, 0.0, -1.0)))
def test_steps_in_a_row(data: st.DataObject, exponent: float) -> None:
    """Trees, limits, costs, outcomes and releases of all kinds."""
    pair = Pair()
    for _ in range(data.draw(st.integers(1, 4))):
        requests = data.draw(st.permutations(REQUESTS))[: data.draw(st.integers(1, 4))]
        drafted = [data.draw(trees(scores=SCORES + BAD_SCORES)) for _ in requests]
        small = st.integers(0, 6) | st.just(255)
        plan = plan_of(*(DecodeStep(r, data.draw(small), data.draw(small)) for r in requests))
        room = data.draw(st.integers(0, 20) | st.just(10**6))
        room = min(room, sum(tree.num_nodes - 1 for tree in drafted))
        stakes = None
        if data.draw(st.integers(0, 3)):
            stakes = Stakes(
                data.draw(costs(len(requests) + room)),
                data.draw(st.sampled_from((0.0, 10.0, 100.0)) | st.floats(0.0, 1000.0)),
                data.draw(st.sampled_from((1.0, 1.03))),
                exponent,
                data.draw(st.sampled_from(((0, 1), (1, 0)))),
            )
        pair.choose(plan, drafted, room, stakes)
        if data.draw(st.integers(0, 5)):
            pair.observe([data.draw(_tokens(tree)) for tree in drafted])
        if data.draw(st.booleans()):
            pair.release(requests[0])


def test_long_runs() -> None:
    """Until cells have forgotten, with requests that change suddenly and more of them than fit."""
    pair = Pair()
    rng = random.Random(0)
    names = [request(f"r{i}", temperature=rng.choice((0.0, 0.7))) for i in range(40)]
    for step in range(80):
        requests = rng.sample(names, 24)
        drafted = [_random_tree(rng) for _ in requests]
        pair.choose(plain_plan_of(requests), drafted, 100, Stakes(FLAT, 1.0, 1.03, 1.0, (0, 1)))
        pair.observe([_random_outcome(rng, tree, 0.2 + 0.6 * (step > 40)) for tree in drafted])
    known = pair.plain.acceptance
    assert [c.seen.max() for c in (known.by_score, known.by_kind, known.by_cell)] == list(MEMORY)


def test_more_kinds_of_agreement_than_are_told_apart() -> None:
    pair = Pair()
    sources = [(f"drafter{i}",) for i in range(MAX_SOURCES + 4)]
    drafted = tree_of(range(len(sources)), [0.95] * len(sources), sources)
    for _ in range(3):
        pair.choose(plain_plan([drafted]), [drafted], 50, Stakes(FLAT, 1.0, 1.0, 1.0, (0, 1)))
        pair.observe([drafted.token_ids[1:4]])


def test_a_batch_larger_than_any_before() -> None:
    pair = Pair()
    small = [tree_of([0])] * 40
    assert pair.choose(plain_plan(small), small, 40, None).num_nodes == 40
    for count in (1, 64, 3):
        drafted = [tree_of([0] * 100, [0.9] * 100, [ONE, TWO, BOTH, ONE] * 25)] * count
        stakes = Stakes(FLAT, 1.0, 1.0, -1.0, (1, 0))
        assert pair.choose(plain_plan(drafted), drafted, 4800, stakes).num_nodes
        pair.observe([(7, 8)] * count)


def test_a_chain_deeper_than_levels_are_told_apart() -> None:
    pair = Pair()
    drafted = [chain_of(2 * NUM_LEVELS, 1.0)]
    chosen = pair.choose(plain_plan(drafted), drafted, 100, Stakes(FLAT, 1.0, 1.0, 1.0, (0, 1)))
    assert chosen.num_nodes == chosen.deepest == 2 * NUM_LEVELS
    assert chosen.by_level[0, -1] > 10 * chosen.by_level[0, -2]


def test_what_only_breaks_even_is_left() -> None:
    pair = Pair()
    drafted = [chain_of(1)]
    worth = pair.choose(plain_plan(drafted), drafted, 1, None).worth
    for cost, count in ((worth, 0), (np.nextafter(worth, 0.0), 1)):
        costs = np.array([0.0, 0.0, cost])
        assert pair.choose(plain_plan(drafted), drafted, 1, Stakes(costs, 1.0)).num_nodes == count


def test_siblings_that_were_drawn_together() -> None:
    pair = Pair()
    drawn = DraftTree((0, 1, 2), (-1, 0, 0), (1.0, 0.9, 0.9), (("x",), ONE, ONE), torch.ones(3, 4))
    assert pair.choose(plain_plan([drawn]), [drawn], 2, None).trees[0] is drawn
    assert pair.choose(plain_plan([drawn]), [drawn], 1, None).trees[0].num_nodes == 1


def test_what_was_not_chosen_is_observed_once() -> None:
    pair = Pair()
    assert pair.observe([(1,)]) == []
    drafted = [chain_of(3, 0.05)]
    pair.choose(plain_plan(drafted), drafted, 0, None)
    assert pair.observe([(1, 2)]) == [ONE]
    assert pair.observe([(1, 2)]) == []


def test_tokens_of_another_number_of_trees() -> None:
    pair = Pair()
    drafted = [chain_of(3), chain_of(3)]
    pair.native.choose(plain_plan(drafted), drafted, 6, None)
    with pytest.raises(ValueError, match="tokens of 1 trees, of 2"):
        pair.native.observe([(1,)])


def test_without_drafters() -> None:
    """As a fixed node budget chooses."""
    pair = Pair(())
    drafted = [chain_of(3), chain_of(5, 0.9)]
    assert pair.choose(plain_plan(drafted), drafted, 4, None).num_nodes == 4


def test_what_is_made_follows_use_native(library: ctypes.CDLL) -> None:
    before = native_choice._native
    try:
        use_native(None)
        assert type(make_chooser(Acceptance())) is Chooser
        use_native(library)
        assert type(make_chooser(Acceptance())) is NativeChooser
    finally:
        use_native(before)


def plain_plan_of(requests: Sequence[Request]) -> StepPlan:
    return plan_of(*(DecodeStep(each, 255) for each in requests))


@st.composite
def _tokens(draw: st.DrawFn, tree: DraftTree) -> list[int]:
    """What may come: a path of the tree and more, or anything, or (an error) nothing."""
    path = tree.path(draw(st.integers(0, tree.num_nodes - 1)))[1:]
    own = [tree.token_ids[node] for node in path]
    return own[: draw(st.integers(0, len(own)))] + draw(st.lists(st.integers(1, 4), max_size=2))


def _random_tree(rng: random.Random) -> DraftTree:
    n = rng.randrange(30)
    sources = [rng.choice((ONE, TWO, BOTH)) for _ in range(n)] if rng.random() < 0.5 else None
    parents = [rng.randrange(node // 2, node + 1) for node in range(n)]
    return tree_of(parents, [rng.choice((0.4, 0.4, 0.9)) for _ in range(n)], sources)


def _random_outcome(rng: random.Random, tree: DraftTree, rate: float) -> list[int]:
    tokens, node = [], 0
    while tree.children[node] and rng.random() < rate:
        node = rng.choice(tree.children[node])
        tokens.append(tree.token_ids[node])
    return [*tokens, 0]


def _tables(acceptance: Acceptance) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    own = acceptance.own
    counts = (acceptance.by_score, acceptance.by_kind, acceptance.by_cell)
    return [
        *(table for count in counts for table in (count.seen, count.right)),
        acceptance.kind_mean,
        acceptance.cell_mean,
        own.rows,
        own.seen,
    ]
