"""CompositeDrafter: trees joined to one, and drafters guarded request by request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.composite import CompositeDrafter, join
from specdec.config import EngineConfig
from specdec.drafting import DraftContext, Drafter
from specdec.errors import UsageError
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree, TreeBuilder
from specdec.verification import Verdict
from tests.toy import ALPHABET, run_all, toy_engine, toy_model

VOCAB = len(ALPHABET)
PROMPTS = {"good": (3, 1, 4, 1, 5), "bad": (2, 7, 1, 8)}
ROOT = 9
Path = tuple[int, ...]


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **settings})


def step(node_budget: int, root: int = ROOT) -> DecodeStep:
    return DecodeStep(Request("a", (1, root), params()), node_budget)


# (parent, token, score) of nodes; a parent is taken modulo the nodes that there are.
buds = st.tuples(
    st.integers(0, 8),
    st.integers(0, 2),
    st.one_of(st.sampled_from([0.25, 0.5, 1.0]), st.floats(0.0, 1.0)),
)


@st.composite
def trees(draw: st.DrawFn, source: str) -> DraftTree:
    builder = TreeBuilder(ROOT, 12)
    num_nodes = 1
    for parent, token_id, score in draw(st.lists(buds, min_size=1, max_size=12)):
        node = builder.add(parent % num_nodes, token_id, score, source)
        num_nodes += node == num_nodes
    return builder.build()


def paths(tree: DraftTree) -> dict[Path, tuple[float, tuple[str, ...]]]:
    """Score and sources of each node, by the tokens that lead to it."""
    return {
        tuple(tree.token_ids[n] for n in tree.path(node)[1:]): (
            tree.scores[node],
            tree.sources[node],
        )
        for node in range(1, tree.num_nodes)
    }


def joined(drafted: Sequence[DraftTree]) -> dict[Path, tuple[float, tuple[str, ...]]]:
    """The oracle: for every path the best score and all sources, in the drafters' order."""
    found: dict[Path, tuple[float, tuple[str, ...]]] = {}
    for tree in drafted:
        for path, (score, sources) in paths(tree).items():
            known, before = found.get(path, (score, ()))
            found[path] = max(known, score), before + sources
    return found


@settings(deadline=None)
@given(trees("a"), trees("b"), trees("c"))
def test_all_nodes_of_all_trees_make_one(a: DraftTree, b: DraftTree, c: DraftTree) -> None:
    tree = join(step(1), [a, b, c])
    got = paths(tree)
    assert tree.token_ids[0] == ROOT and len(got) == tree.num_nodes - 1  # no path twice
    assert got == joined([a, b, c])


@settings(deadline=None)
@given(trees("a"))
def test_the_tree_of_one_drafter_passes_as_it_is(tree: DraftTree) -> None:
    assert join(step(1), [tree]) is tree
    assert join(step(1), []) == DraftTree.root_only(ROOT)


class ChainDrafter(Drafter):
    """Drafts the true continuation as one chain."""

    def __init__(self, truth: dict[str, list[int]], name: str = "sound", reach: int = 99) -> None:
        self.name = name  # type: ignore[misc]  # several in one composition
        self._truth, self._reach = truth, reach
        self.seen: list[tuple[str, str]] = []

    def admit(self, request: Request) -> None:
        self.seen.append(("admit", request.request_id))

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        self.seen += [("draft", each.request.request_id) for each in steps]
        return [self._tree(each) for each in steps]

    def _tree(self, each: DecodeStep) -> DraftTree:
        known = len(each.request.output)
        path = self._truth[each.request.request_id][known : known + self._reach]
        budget = each.node_budget
        return DraftTree.from_paths(each.root, [path], source=self.name, node_budget=budget)

    def observe(self, request: Request, verdict: Verdict, hidden: Tensor | None) -> None:
        self.seen.append(("observe", request.request_id))

    def release(self, request: Request) -> None:
        self.seen.append(("release", request.request_id))


class FaultyDrafter(ChainDrafter):
    """Sound but for the request "bad", which it fails in one way once there is output."""

    def __init__(self, truth: dict[str, list[int]], fault: str) -> None:
        super().__init__(truth, "faulty", reach=2)
        self._fault = fault

    def _is_due(self, fault: str, request: Request, num_output: int = 3) -> bool:
        is_bad = request.request_id == "bad" and len(request.output) >= num_output
        return is_bad and self._fault.split("+")[0] == fault

    def admit(self, request: Request) -> None:
        super().admit(request)
        if self._is_due("admit", request, 0):
            raise RuntimeError("no place")

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        drafted = super().draft(steps)
        if any(self._is_due("draft", each.request) for each in steps):
            raise IndexError("lost")
        if any(self._is_due("type", each.request) for each in steps):
            return None  # type: ignore[return-value]  # a drafter that breaks its contract
        if any(self._is_due("number", each.request) for each in steps):
            return drafted[:-1]
        return drafted

    def _tree(self, each: DecodeStep) -> DraftTree:
        wrong: dict[str, Callable[[], DraftTree]] = {
            "root": lambda: DraftTree.root_only((each.root + 1) % VOCAB),
            "nodes": lambda: DraftTree.from_paths(
                each.root,
                [range(each.node_budget + 1)],
                source=self.name,
                node_budget=each.node_budget + 1,
            ),
            "high": lambda: DraftTree((each.root, VOCAB), (-1, 0), (1.0,) * 2, (("faulty",),) * 2),
            "low": lambda: DraftTree((each.root, -1), (-1, 0), (1.0,) * 2, (("faulty",),) * 2),
        }
        for fault, make in wrong.items():
            if self._is_due(fault, each.request):
                return make()
        return super()._tree(each)

    def observe(self, request: Request, verdict: Verdict, hidden: Tensor | None) -> None:
        super().observe(request, verdict, hidden)
        if self._is_due("observe", request):
            raise ValueError("not understood")

    def release(self, request: Request) -> None:
        super().release(request)
        is_also = self._fault.endswith("+release") and request.request_id == "bad"
        if is_also or self._is_due("release", request):
            raise KeyError("gone")


def truths(**settings: Any) -> dict[str, list[int]]:
    made = {}
    for name, prompt in PROMPTS.items():
        request = Request(name, prompt, params(**settings))
        run_all(toy_engine(), [request])
        made[name] = request.output_ids
    return made


TRUTHS = truths()
FAULTS = {
    "admit": "RuntimeError: no place",
    "draft": "IndexError: lost",
    "draft+release": "IndexError: lost",
    "type": "TypeError: object of type 'NoneType'",
    "number": "ValueError: 0 trees for 1 steps",
    "root": "ValueError: the tree begins with",
    "nodes": "ValueError: 5 nodes; the budget is 4",
    "high": "ValueError: a token id is not below",
    "low": "ValueError: a token id is not below",
    "observe": "ValueError: not understood",
    "observe+release": "ValueError: not understood",
    "release": "KeyError: 'gone'",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_drafter_is_disabled_for_the_request_it_fails_and_no_other(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    faulty, sound = FaultyDrafter(TRUTHS, fault), ChainDrafter(TRUTHS, reach=3)
    composite = CompositeDrafter([faulty, sound], vocab_size=VOCAB)
    engine = toy_engine(drafter=composite, node_budget=4)
    requests = {name: Request(name, prompt, params()) for name, prompt in PROMPTS.items()}
    with caplog.at_level(logging.WARNING):
        outputs = run_all(engine, list(requests.values()))
    assert {name: request.output_ids for name, request in requests.items()} == TRUTHS
    (warning,) = caplog.records
    said = warning.getMessage()
    assert said.startswith("drafter faulty is disabled for request bad: ") and FAULTS[fault] in said
    assert not warning.exc_info  # a trace is for debugging
    assert dict(composite.num_faults) == {"faulty": 1}
    assert requests["good"].stats.disabled_drafters == []
    assert requests["bad"].stats.disabled_drafters == ["faulty"]
    ended = {output.request_id: output.stats for output in outputs if output.finish_reason}
    assert ended["bad"] is not None and ended["bad"].as_wire()["disabled_drafters"] == ["faulty"]
    # It is asked no more for the one, and goes on for the other; each is released once.
    for name, drafter in [(n, d) for n in PROMPTS for d in (faulty, sound)]:
        calls = [call for call, of in drafter.seen if of == name]
        assert calls.count("release") == 1 and calls[-1] == "release"
    assert requests["good"].stats.accepted_by_source["faulty"] > 6
    assert requests["bad"].stats.accepted_by_source["sound"] > 6
    assert composite._active == {} and engine.drafter._active == {}


def test_joint_nodes_count_for_each_drafter_and_once_for_all() -> None:
    long, short = ChainDrafter(TRUTHS, "long", 4), ChainDrafter(TRUTHS, "short", 2)
    composite = CompositeDrafter([short, long], vocab_size=VOCAB)
    engine = toy_engine(drafter=composite, node_budget=8)
    started = time.perf_counter()
    request = Request("good", PROMPTS["good"], params(max_tokens=11))
    outputs = run_all(engine, [request])
    stats = request.stats
    # Two steps of four nodes and a bonus token; the last token leaves nothing to draft.
    assert [len(output.tokens) for output in outputs] == [5, 5, 1]
    assert stats.num_draft_tokens == stats.num_accepted == 8
    assert stats.drafted_by_source == stats.accepted_by_source == {"long": 8, "short": 4}
    joint, own, bonus = ("short", "long"), ("long",), ("target",)
    assert [token.sources for token in outputs[0].tokens] == [joint, joint, own, own, bonus]
    assert composite.num_steps == {"long": 2, "short": 2}
    assert set(composite.seconds) == {"long", "short"}
    assert 0 < sum(composite.seconds.values()) < time.perf_counter() - started


def test_every_drafter_is_told_that_the_engine_ends() -> None:
    class Closing(ChainDrafter):
        def close(self) -> None:
            self.seen.append(("close", self.name))

    drafters = [Closing(TRUTHS, name) for name in ("a", "b")]
    CompositeDrafter(drafters, vocab_size=VOCAB).close()
    assert [drafter.seen for drafter in drafters] == [[("close", "a")], [("close", "b")]]


@pytest.mark.parametrize("fault", ["", "ValueError: unknown"])
def test_a_drafter_that_cannot_guess_for_a_request_is_left_alone(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Choosy(ChainDrafter):
        def serves(self, request: Request) -> bool:
            if fault and request.request_id == "bad":
                raise ValueError("unknown")
            return request.request_id != "bad"

    choosy, sound = Choosy(TRUTHS, "choosy"), ChainDrafter(TRUTHS, reach=2)
    engine = toy_engine(drafter=CompositeDrafter([choosy, sound], vocab_size=VOCAB), node_budget=4)
    requests = [Request(name, prompt, params()) for name, prompt in PROMPTS.items()]
    with caplog.at_level(logging.WARNING):
        run_all(engine, requests)
    assert {request.request_id: request.output_ids for request in requests} == TRUTHS
    assert {of for _, of in choosy.seen} == set(PROMPTS) - {"bad"}
    assert [fault in record.getMessage() for record in caplog.records] == [True] * bool(fault)


def test_without_a_node_budget_no_drafter_is_asked() -> None:
    drafter = ChainDrafter(TRUTHS)
    composite = CompositeDrafter([drafter], vocab_size=VOCAB)
    request = Request("good", PROMPTS["good"], params())
    composite.admit(request)
    assert composite.draft([DecodeStep(request, 0)]) == [DraftTree.root_only(5)]
    assert ("draft", "good") not in drafter.seen
    assert composite.draft([DecodeStep(request, 1)])[0].num_nodes == 2


def test_only_the_drafters_of_a_step_are_asked_and_told_how_deep() -> None:
    seen: list[tuple[str, int]] = []

    class Noting(ChainDrafter):
        def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
            seen.extend((self.name, each.max_depth) for each in steps)
            return super().draft(steps)

    names = ("a", "b", "c")
    composite = CompositeDrafter([Noting(TRUTHS, name) for name in names], vocab_size=VOCAB)
    request = Request("good", PROMPTS["good"], params())
    composite.admit(request)
    composite.draft([DecodeStep(request, 4, max_depth=7, levels={"c": 2, "a": 9})])
    assert seen == [("a", 7), ("c", 2)]
    assert composite.num_asked == {"a": 1, "c": 1} and set(composite.asked_s) == {"a", "c"}
    composite.draft([DecodeStep(request, 4, levels={})])
    assert composite.num_asked == {} and composite.asked_s == {}


def test_drafters_are_loaded_in_the_order_of_their_names() -> None:
    def load(names: str) -> CompositeDrafter:
        return CompositeDrafter.load(DraftContext(toy_model(), EngineConfig(drafter=names)))

    assert [drafter.name for drafter in load("ngram, none").drafters] == ["ngram", "none"]
    for names, says in [
        ("ngram,ngram", "'ngram' is named twice"),
        ("nrgam", "unknown drafter 'nrgam'; choose from .*ngram.*none"),
        ("ngram,", "unknown drafter ''"),
        ("ngram=folder", "ngram takes no checkpoint"),
    ]:
        with pytest.raises(UsageError, match=says):
            load(names)
