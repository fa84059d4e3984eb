"""StepRecord: what it counts is what a walk through the tree finds, and what the engine counts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.controller import FixedBudget
from specdec.engine import Engine
from specdec.params import SamplingParams
from specdec.plan import DecodeStep, StepPlan
from specdec.request import Request
from specdec.step_record import StepRecord
from specdec.text import StopMatcher
from specdec.tree import DraftTree
from tests.candidate_trees import tree_of, trees
from tests.toy import (
    ALPHABET,
    EOS,
    TruthDrafter,
    run_all,
    toy_engine,
    toy_tokenizer,
)


@st.composite
def walks(draw: st.DrawFn) -> tuple[DraftTree, tuple[int, ...], int]:
    """A tree, a path from its root to anywhere, and how many of its tokens and the bonus stay."""
    tree = draw(trees())
    path: list[int] = []
    while children := tree.children[path[-1] if path else 0]:
        if not draw(st.integers(0, 3)):
            break
        path.append(children[draw(st.integers(0, len(children) - 1))])
    return tree, tuple(path), draw(st.integers(1, len(path) + 1))


@given(trees(), walks())
@settings(deadline=None)
def test_it_counts_what_a_walk_finds(
    candidates: DraftTree, walk: tuple[DraftTree, tuple[int, ...], int]
) -> None:
    """The walk is made here once more, one node and one drafter at a time."""
    tree, path, num_tokens = walk
    evaluated: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    num_evaluated = num_accepted = num_cut = 0
    at, left = 0, num_tokens
    for following in (*path, None):
        children = [node for node in range(1, tree.num_nodes) if tree.parents[node] == at]
        for child in children:
            evaluated.update(tree.sources[child])
        num_evaluated += bool(children)
        if following is None:
            break
        if left > 0:
            accepted.update(tree.sources[following])
            num_accepted += 1
            left -= 1
        else:
            num_cut += 1
        at = following
    record = StepRecord.of(candidates, tree, path, num_tokens)
    assert record.offered == by_depth(candidates)
    assert record.verified == by_depth(tree)
    assert (record.num_evaluated, record.num_accepted) == (num_evaluated, num_accepted)
    assert (record.num_cut, record.num_tokens) == (num_cut, num_tokens)
    assert record.evaluated_by == evaluated
    assert record.accepted_by == accepted


def by_depth(tree: DraftTree) -> tuple[int, ...]:
    depths = [len(tree.path(node)) - 1 for node in range(tree.num_nodes)]
    return tuple(depths.count(depth) for depth in range(1, max(depths) + 1))


def test_a_chain_whose_third_node_is_wrong() -> None:
    tree = tree_of([0, 1, 2, 3], sources=[("a",), ("a", "b"), ("b",), ("b",)])
    record = StepRecord.of(tree, tree, [1, 2], 3)
    assert (record.num_evaluated, record.num_accepted, record.num_cut) == (3, 2, 0)
    assert record.evaluated_by == {"a": 2, "b": 2}
    assert record.accepted_by == {"a": 2, "b": 1}


# --- through the engine ---

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [3, 3, 3], [9, 2, 14, 6, 1]]


def requests(keeps_steps: bool = True, **params: Any) -> list[Request]:
    params = {"max_tokens": 40, "ignore_eos": True, **params}
    stop = params.pop("stop_matcher", None)
    return [
        Request(
            f"r{index}",
            tuple(prompt),
            SamplingParams(seed=index, **params),
            keeps_steps=keeps_steps,
            stop_matcher=stop() if stop else None,
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def truth_of(**params: Any) -> dict[str, list[int]]:
    """What the requests answer, without stops."""
    plain = requests(**params)
    run_all(toy_engine(), plain)
    return {req.request_id: list(req.output_ids) for req in plain}


def check_sums(found: Sequence[Request]) -> list[StepRecord]:
    """A request's records make its counts; all of them together."""
    for req in found:
        records, stats = req.steps, req.stats
        assert len(records) == stats.num_steps
        assert sum(record.num_tokens for record in records) == len(req.output)
        assert sum(record.num_accepted for record in records) == stats.num_accepted
        assert sum(sum(record.verified) for record in records) == stats.num_draft_tokens
        assert Counter(record.num_accepted for record in records) == stats.accepted_lengths
        assert max((len(record.verified) for record in records), default=0) == stats.deepest
        by = Counter(chain.from_iterable(Counter(r.accepted_by).elements() for r in records))
        assert by == stats.accepted_by_source
        for record in records:
            assert record.num_tokens in (record.num_accepted, record.num_accepted + 1)
            assert record.num_accepted + record.num_cut <= record.num_evaluated
            assert record.num_evaluated <= record.num_accepted + record.num_cut + 1
            assert record.num_evaluated <= len(record.verified)
        for record in records[:-1]:
            assert record.num_cut == 0, "only what ends a request cuts"
            assert record.num_tokens == record.num_accepted + 1
    return [record for req in found for record in req.steps]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_records_make_the_requests_counts(rule: str, temperature: float) -> None:
    truth = truth_of(temperature=temperature)
    drafter = TruthDrafter(truth, 3, 0.8)
    engine = toy_engine(drafter=drafter, node_budget=8, verification=rule)
    found = requests(temperature=temperature)
    run_all(engine, found)
    records = check_sums(found)
    assert all(record.offered == record.verified for record in records)
    assert any(record.num_accepted > 1 for record in records)
    assert any(not record.verified for record in records), "a step without guesses counts"


def test_what_is_not_asked_for_is_not_kept() -> None:
    found = requests(keeps_steps=False)
    run_all(toy_engine(), found)
    assert all(req.steps == [] for req in found)


class Oracle(TruthDrafter):
    """Chains of the truth, as long as the budget."""

    name = "oracle"

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        found = []
        for step in steps:
            done = len(step.request.output)
            coming = self._truth[step.request.request_id][done : done + step.node_budget]
            found.append(
                DraftTree.from_paths(
                    step.root, [coming], source=self.name, node_budget=step.node_budget
                )
            )
        return found


def oracle(truth: dict[str, list[int]]) -> Engine:
    return toy_engine(drafter=Oracle(truth, 0, 1.0), node_budget=8)


def test_a_stop_token_within_an_accepted_path_cuts_the_rest() -> None:
    """Each place of the stop within the steps of nine tokens, by stopping at each token."""
    truth = truth_of()
    num_cut = Counter[int]()
    for token in range(EOS):
        found = requests(ignore_eos=False, stop_token_ids=frozenset({token}))
        run_all(oracle(truth), found)
        check_sums(found)
        for req in found:
            answer = truth[req.request_id]
            place = answer.index(token) if token in answer else None
            last = req.steps[-1]
            if place is None or EOS in answer[:place]:
                continue
            assert req.output_ids == answer[: place + 1]
            within = place % 9
            assert last.num_tokens == within + 1
            length = min(8, len(answer) - (place - within))  # of the step's path
            assert last.num_accepted == min(within + 1, length)
            assert last.num_accepted + last.num_cut == length
            num_cut[last.num_cut] += 1
    assert num_cut[0] and num_cut[7], "a stop as the bonus token, and as the first of a path"


def test_a_stop_string_cuts_the_rest() -> None:
    truth = truth_of()
    text = toy_tokenizer().decode(truth["r0"][11:13])
    assert len(text) == 2 and set(text) <= set(ALPHABET)
    found = requests(stop=(text,), stop_matcher=lambda: StopMatcher(toy_tokenizer(), (text,)))
    run_all(oracle(truth), found)
    check_sums(found)
    first = found[0]
    assert first.finish_reason == "stop"
    assert len(first.output) == 13
    assert (first.steps[-1].num_accepted, first.steps[-1].num_cut) == (4, 4)


@pytest.mark.parametrize("max_tokens", [1, 8, 9, 10, 13, 27])
def test_the_longest_length_cuts_or_shortens_the_last_step(max_tokens: int) -> None:
    truth = truth_of()
    found = requests(max_tokens=max_tokens)
    run_all(oracle(truth), found)
    check_sums(found)
    for req in found:
        assert len(req.output) == max_tokens
        assert len(req.steps) == -(-max_tokens // 9)
        assert req.steps[-1].num_tokens == (max_tokens - 1) % 9 + 1


class Fickle(FixedBudget):
    """Verifies what is likeliest of as many nodes as a coin says, as adaptive control may."""

    def choose(self, plan: StepPlan, candidates: Sequence[DraftTree]) -> list[DraftTree]:
        room = random.Random(self.num_steps).randrange(1 + sum(t.num_nodes - 1 for t in candidates))
        return super().choose(replace(plan, node_room=room), candidates)


@pytest.mark.parametrize("control", ["adaptive", "fickle"])
def test_no_more_is_verified_than_is_proposed(control: str) -> None:
    drafter = TruthDrafter(truth_of(), 3, 0.8)
    engine = (
        toy_engine(drafter=drafter, node_budget=12, control="adaptive")
        if control == "adaptive"  # what it decides is a matter of time
        else toy_engine(drafter=drafter, node_budget=12, controller=Fickle(12))
    )
    found = requests()
    run_all(engine, found)
    records = check_sums(found)
    for record in records:
        assert len(record.offered) >= len(record.verified)
        pairs = zip(record.offered, record.verified, strict=False)
        assert all(offered >= kept for offered, kept in pairs)
    if control == "fickle":
        assert any(sum(record.offered) > sum(record.verified) > 0 for record in records)
        assert any(record.offered and not record.verified for record in records)
