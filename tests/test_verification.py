"""The walk through a draft tree: against a naive oracle, and case by case."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import verification
from specdec.config import Verification
from specdec.host_verifier import HostVerifier
from specdec.kernels.batch import Batch
from specdec.params import SamplingParams
from specdec.plan import DecodeStep, StepPlan
from specdec.request import Request
from specdec.sampling import Sampler
from specdec.tree import ROOT_SOURCE, DraftTree
from specdec.verification import Verdict, records, verify

VOCAB = 6
RULES: tuple[Verification, ...] = get_args(Verification)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)


def sampler_for(params: SamplingParams, seed: int = 0) -> Sampler:
    return Sampler(params, (1, 2), seed=seed, eos_token_ids=())


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Any shape; siblings carry distinct tokens."""
    parents, token_ids = [-1], [0]
    used: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, 14))):
        parent = draw(st.integers(0, len(parents) - 1))
        token_id = draw(st.integers(0, VOCAB - 1))
        if (parent, token_id) not in used:
            used.add((parent, token_id))
            parents.append(parent)
            token_ids.append(token_id)
    sources = ((ROOT_SOURCE,), *((f"d{i % 3}",) for i in range(1, len(parents))))
    return DraftTree(tuple(token_ids), tuple(parents), (0.0,) * len(parents), sources)


def path_tokens(tree: DraftTree, node: int) -> list[int]:
    return [tree.token_ids[n] for n in tree.path(node)[1:]]


def target_row(path: Sequence[int]) -> Tensor:
    """Logits that depend on the path, so that equal paths in two trees have equal logits."""
    rng = random.Random(str(list(path)))
    return torch.tensor([rng.gauss(0, 1.5) for _ in range(VOCAB)])


def rows_of(tree: DraftTree, output: Sequence[int] = ()) -> Tensor:
    return torch.stack(
        [target_row([*output, *path_tokens(tree, n)]) for n in range(tree.num_nodes)]
    )


def plain_decoding(sampler: Sampler, output: Sequence[int], count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        history = [*output, *tokens]
        tokens.append(sampler.choose(target_row(history), history))
    return tokens


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 3]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    bad_words=st.sampled_from([(), ((1, 2), (3, 3))]),
    min_tokens=st.sampled_from([0, 2]),
    stop_token_ids=st.just(frozenset({4})),
)
outputs = st.lists(st.integers(0, VOCAB - 1), max_size=3)


@given(trees(), params_strategy, outputs, st.integers(0, 2**64 - 1))
@settings(max_examples=300, deadline=None)
def test_coupled_walk_equals_plain_decoding_as_far_as_the_tree_goes(
    tree: DraftTree, params: SamplingParams, output: list[int], seed: int
) -> None:
    """The oracle decodes token by token and then looks for its text in the tree."""
    sampler = sampler_for(params, seed)
    verdict = verify("coupled", tree, rows_of(tree, output), sampler, output)
    truth = plain_decoding(sampler, output, tree.num_nodes)
    nodes = {tuple(path_tokens(tree, n)): n for n in range(tree.num_nodes)}
    length = max(n for n in range(tree.num_nodes) if tuple(truth[:n]) in nodes)
    assert verdict.token_ids == tuple(truth[: length + 1])
    assert verdict.path == tuple(nodes[tuple(truth[:n])] for n in range(1, length + 1))
    assert verdict.accepted_length == length and verdict.rows == (0, *verdict.path)
    assert verdict.sources == (*(tree.sources[n] for n in verdict.path), (ROOT_SOURCE,))


@given(trees(), params_strategy, st.integers(0, 2**64 - 1), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_coupled_does_not_care_for_the_order_of_siblings(
    tree: DraftTree, params: SamplingParams, seed: int, rng: random.Random
) -> None:
    order, ready = [0], list(tree.children[0])
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        ready += tree.children[order[-1]]
    place = {node: index for index, node in enumerate(order)}
    shuffled = DraftTree(
        tuple(tree.token_ids[n] for n in order),
        tuple(-1 if n == 0 else place[tree.parents[n]] for n in order),
        tuple(tree.scores[n] for n in order),
        tuple(tree.sources[n] for n in order),
    )
    sampler = sampler_for(params, seed)
    verdict = verify("coupled", tree, rows_of(tree), sampler, [])
    other = verify("coupled", shuffled, rows_of(shuffled), sampler, [])
    assert other.token_ids == verdict.token_ids and other.sources == verdict.sources
    assert other.path == tuple(place[n] for n in verdict.path)


@given(trees(), outputs)
@settings(max_examples=100, deadline=None)
def test_all_rules_agree_at_temperature_zero(tree: DraftTree, output: list[int]) -> None:
    rows = rows_of(tree, output)
    verdicts = {verify(rule, tree, rows, sampler_for(GREEDY), output) for rule in RULES}
    assert len(verdicts) == 1


def chain(*tokens: int) -> DraftTree:
    return DraftTree.from_paths(0, [tokens], source="toy", node_budget=len(tokens))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_empty_tree_yields_one_token(rule: Verification, params: SamplingParams) -> None:
    verdict = verify(rule, DraftTree.root_only(0), rows_of(chain()), sampler_for(params), [])
    assert verdict.path == () and len(verdict.token_ids) == 1
    assert verdict.sources == ((ROOT_SOURCE,),)
    # Plain decoding is the same under every rule, noise included.
    assert list(verdict.token_ids) == plain_decoding(sampler_for(params), [], 1)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "typical"])
def test_perfect_match_early_mismatch_and_single_token(rule: Verification) -> None:
    truth = plain_decoding(sampler_for(GREEDY), [], 5)
    for num_right in range(5):
        wrong = (truth[num_right] + 1) % VOCAB
        tree = chain(*truth[:num_right], *([wrong] * (4 - num_right)))
        verdict = verify(rule, tree, rows_of(tree), sampler_for(GREEDY), [])
        assert verdict == Verdict(
            tuple(range(1, num_right + 1)),
            tuple(truth[: num_right + 1]),
            (*[("toy",)] * num_right, (ROOT_SOURCE,)),
        )


def test_coupled_accepts_a_sampled_truth_whatever_else_is_drafted() -> None:
    for seed in range(20):
        sampler = sampler_for(SAMPLED, seed)
        truth = plain_decoding(sampler, [], 4)
        tree = DraftTree.from_paths(0, [[0, 1, 2], [5, 5], truth[:3]], source="toy", node_budget=20)
        verdict = verify("coupled", tree, rows_of(tree), sampler, [])
        assert list(verdict.token_ids) == truth


def sibling_rows(probs: Sequence[float], num_nodes: int) -> Tensor:
    return torch.tensor(probs).log().expand(num_nodes, -1)


def test_rejection_accepts_a_point_mass_with_its_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = sibling_rows([0.5, 0.3, 0.2], 2)
    for value, is_accepted in [(0.0001, True), (0.299, True), (0.301, False), (0.9999, False)]:
        monkeypatch.setattr(verification, "coin", lambda seed, p, i, v=value: v)
        for seed in range(10):
            verdict = verify("rejection", chain(1), rows, sampler_for(SAMPLED, seed), [])
            assert bool(verdict.path) is is_accepted
            assert is_accepted or verdict.token_ids[0] != 1  # the residual has no mass there


def sampled_tree(tokens: Sequence[int], q: Sequence[float]) -> DraftTree:
    """Siblings drawn in this order, without replacement, from q."""
    n = len(tokens) + 1
    probs = torch.tensor(q).expand(n, -1)
    return DraftTree(
        (0, *tokens), (-1, *[0] * (n - 1)), (0.0,) * n, ((ROOT_SOURCE,), *[("s",)] * (n - 1)), probs
    )


def test_rejection_of_sampled_drafts_follows_the_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = [0.1, 0.3, 0.6], [0.5, 0.3, 0.2]
    tree, rows = sampled_tree([0, 1], q), sibling_rows(p, 3)
    # First sibling: accept below p/q = 0.2. Then p becomes (0, 0, 1) and q (0, 0.6, 0.4), so that
    # the second sibling is never right.
    for first, token in [(0.19, 0), (0.21, 2)]:
        coins = {0: first, 1: 1e-9}
        monkeypatch.setattr(verification, "coin", lambda seed, pos, i, c=coins: c[i])
        verdict = verify("rejection", tree, rows, sampler_for(SAMPLED), [])
        assert verdict.token_ids[0] == token
    assert verdict.path == ()


def test_second_sibling_is_judged_by_q_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = [0.1, 0.4, 0.5], [0.5, 0.3, 0.2]
    # After rejecting 0: p = (0, 0.1, 0.3) / 0.4 and q = (0, 0.6, 0.4): accept 1 below 0.25 / 0.6.
    for value, token_path in [(0.41, (2,)), (0.42, ())]:
        coins = {0: 0.9, 1: value}
        monkeypatch.setattr(verification, "coin", lambda seed, pos, i, c=coins: c[i])
        tree = sampled_tree([0, 1], q)
        verdict = verify("rejection", tree, sibling_rows(p, 3), sampler_for(SAMPLED), [])
        assert verdict.path == token_path


def test_rejection_by_rounding_stays_within_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """p = q up to rounding leaves no residual; the answer was token 0, even where it is banned."""
    monkeypatch.setattr(verification, "coin", lambda seed, position, index: 1 - 2.0**-33)
    params = SamplingParams(temperature=1.0, allowed_token_ids=frozenset({3, 4}))
    rows = sibling_rows([1 / VOCAB] * VOCAB, 3)
    q = torch.zeros(VOCAB)
    q[[3, 4]] = 0.5 + 2.0**-24
    for seed in range(10):
        tree = sampled_tree([3, 4], q.tolist())
        (token_id,) = verify("rejection", tree, rows[:3], sampler_for(params, seed), []).token_ids[
            -1:
        ]
        assert token_id in (3, 4)


def test_typical_is_lossy() -> None:
    """It takes the likeliest child above its threshold always, though the target seldom would."""
    probs = [0.45, 0.35, 0.2]
    entropy = -sum(p * math.log(p) for p in probs)
    assert min(0.09, 0.3 * math.exp(-entropy)) < 0.2
    rows = sibling_rows(probs, 2)
    verdicts = [verify("typical", chain(2), rows, sampler_for(SAMPLED, s), []) for s in range(200)]
    assert all(v.token_ids[0] == 2 for v in verdicts)  # 100% where the target says 20%
    lossless: Literal["coupled"] = "coupled"
    taken = [verify(lossless, chain(2), rows, sampler_for(SAMPLED, s), []) for s in range(200)]
    assert 20 < sum(v.token_ids[0] == 2 for v in taken) < 65


def test_typical_rejects_what_is_below_the_threshold() -> None:
    rows = sibling_rows([0.9, 0.05, 0.05], 3)
    tree = DraftTree.from_paths(0, [[1], [2]], source="toy", node_budget=2)
    assert verify("typical", tree, rows, sampler_for(SAMPLED), []).path == ()
    tree = DraftTree.from_paths(0, [[1], [0]], source="toy", node_budget=2)
    assert verify("typical", tree, rows, sampler_for(SAMPLED), []).path == (2,)


def test_records_tell_where_each_token_came_from() -> None:
    truth = plain_decoding(sampler_for(GREEDY), [], 3)
    tree = DraftTree.from_paths(0, [[9], truth[:2]], source="toy", node_budget=9)
    rows = rows_of(tree)
    verdict = verify("coupled", tree, rows, sampler_for(GREEDY), [])
    got = records(verdict, rows, step=4, num_logprobs=2)
    assert [(r.token_id, r.sources, r.depth, r.step) for r in got] == [
        (truth[0], ("toy",), 1, 4),
        (truth[1], ("toy",), 2, 4),
        (truth[2], (ROOT_SOURCE,), 3, 4),
    ]
    for n, record in enumerate(got):
        log_probs = target_row(truth[:n]).log_softmax(0)
        assert record.logprob == float(log_probs[truth[n]]) == record.top_logprobs[0][1]
        assert len(record.top_logprobs) == 2
    bare = records(verdict, rows, step=4, num_logprobs=None)
    assert bare == [dataclasses.replace(r, logprob=None, top_logprobs=()) for r in got]


@pytest.mark.parametrize("broken_row", [0, 1])
def test_one_broken_row_breaks_its_tree_alone(broken_row: int) -> None:
    tree = DraftTree.from_paths(1, [[2]], source="x", node_budget=1)
    names = ("broken", "fine")
    requests = [Request(name, (1,), SamplingParams(seed=0)) for name in names]
    samplers = {name: Sampler(SamplingParams(), (1,), seed=0, eos_token_ids=()) for name in names}
    logits = torch.zeros(4, 5)
    logits[broken_row, 3] = float("inf")
    plan = StepPlan((), tuple(DecodeStep(request, 1) for request in requests))
    batch = Batch((), (), (), (), (), (0, 2, 4))
    verified = HostVerifier("coupled").verify(plan, [tree, tree], logits, batch, samplers)
    assert [item.error is None for item in verified] == [False, True]
    assert not verified[0].records
