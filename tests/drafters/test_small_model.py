"""SmallModelDrafter: right wherever it equals the target, and never out of step with a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafters import small_model
from specdec.drafters.small_model import SmallModelDrafter
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.kv_cache import slot_at
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request, RequestOutput
from specdec.tree import DraftTree
from specdec.verification import Verdict
from tests.cache_contents import by_slot
from tests.drafters.toy_drafters import backend_of, check_drafter, num_held, toy_draft_model
from tests.toy import ALPHABET, CONFIG, check_pool, run_all, toy_engine, toy_model

pytestmark = pytest.mark.usefixtures("backend")

VOCAB = len(ALPHABET)
PROMPT = tuple(index * 7 % VOCAB for index in range(20))
BLOCK = 16


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 5, **settings})


def drafter_of(noise: float = 0.0, num_blocks: int = 40) -> SmallModelDrafter:
    draft = toy_draft_model(backend_of(toy_model()), noise)
    return SmallModelDrafter(draft, num_blocks=num_blocks, block_size=BLOCK)


class Recorder(SmallModelDrafter):
    """Keeps each step's tree and what was accepted of it."""

    def __init__(self, noise: float = 0.0, num_blocks: int = 40) -> None:
        draft = toy_draft_model(backend_of(toy_model()), noise)
        super().__init__(draft, num_blocks=num_blocks, block_size=BLOCK)
        self.trees: dict[str, list[DraftTree]] = {}
        self.verdicts: dict[str, list[Verdict]] = {}

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        trees = super().draft(steps)
        for step, tree in zip(steps, trees, strict=True):
            self.trees.setdefault(step.request.request_id, []).append(tree)
        return trees

    def observe(self, request: Request, verdict: Verdict, hidden: Tensor | None) -> None:
        self.verdicts.setdefault(request.request_id, []).append(verdict)


def run(engine: Engine, *requests: Request) -> list[RequestOutput]:
    outputs = run_all(engine, requests)
    check_drafter(engine.drafter)
    assert num_held(engine.drafter) == 0
    return outputs


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("node_budget", [1, 5, 12])
def test_where_it_is_the_target_every_guess_of_a_chain_is_accepted(
    temperature: float, node_budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any temperature: the noise that draws the target's tokens ranks the guesses."""
    monkeypatch.setattr(small_model, "NUM_CHILDREN", 1)
    monkeypatch.setattr(small_model, "LEAST_WORTH", 0.0)
    drafter = Recorder()
    request = Request("a", PROMPT, params(temperature=temperature, max_tokens=30))
    run(toy_engine(drafter=drafter, node_budget=node_budget), request)
    length = min(node_budget, small_model.MAX_DEPTH)
    for tree, verdict in zip(drafter.trees["a"][:-1], drafter.verdicts["a"], strict=False):
        assert tree.is_chain and tree.num_nodes == 1 + length
        assert verdict.accepted_length == length
    assert len(drafter.verdicts["a"]) == -(-30 // (length + 1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_holds_the_chain_and_uses_its_budget(temperature: float) -> None:
    drafter = Recorder()
    request = Request("a", PROMPT, params(temperature=temperature, max_tokens=60))
    run(toy_engine(drafter=drafter, node_budget=16), request)
    whole = drafter.trees["a"][:-2]  # the limit leaves less room for the last
    assert all(tree.num_nodes == 17 for tree in whole)
    assert max(max(tree.depths) for tree in whole) > 2
    assert any(not tree.is_chain for tree in whole)
    for tree in whole:  # no path twice: each level is guessed once
        paths = {tuple(tree.token_ids[n] for n in tree.path(i)) for i in range(17)}
        assert len(paths) == 17
    for verdict in drafter.verdicts["a"][:-1]:
        assert verdict.accepted_length >= 1 and verdict.path[0] == 1  # its first guess is right


def test_trees_are_grown_level_by_level_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's guesses are those that would be the first ones once its path was committed."""
    monkeypatch.setattr(small_model, "NUM_CHILDREN", 2)
    drafter = drafter_of()
    request = Request("a", PROMPT, params())
    drafter.admit(request)
    (tree,) = drafter.draft([DecodeStep(request, 12)])
    assert max(tree.depths) >= 2
    for node, below in enumerate(tree.children):
        if not below:
            continue
        path = [tree.token_ids[n] for n in tree.path(node)[1:]]
        longer = Request("b", (*PROMPT, *path), params())
        drafter.admit(longer)
        (after,) = drafter.draft([DecodeStep(longer, len(below))])
        found = {after.token_ids[child]: after.scores[child] for child in after.children[0]}
        best = tree.token_ids[below[0]]
        assert after.token_ids[1] == best and found[best] == tree.scores[below[0]]
        drafter.release(longer)


class Checked(Recorder):
    """Compares its keys, values and trees at every step with those computed from scratch."""

    num_compared = num_hits = num_root_only = 0

    def admit(self, request: Request) -> None:
        super().admit(request)
        self.num_hits += self._followers[request.request_id].num_computed > 0

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        trees = super().draft(steps)
        for step, tree in zip(steps, trees, strict=True):
            if tree.num_nodes > 1:
                self._compare(step, tree)
            else:
                self.num_root_only += step.node_budget > 0
        return trees

    def _compare(self, step: DecodeStep, tree: DraftTree) -> None:
        fresh = drafter_of(noise=0.1, num_blocks=12)
        fresh.admit(step.request)
        assert fresh.draft([step]) == [tree]
        assert torch.equal(kept(self, step.request), kept(fresh, step.request))
        self.num_compared += 1


def kept(drafter: SmallModelDrafter, request: Request) -> Tensor:
    """Keys and values of a request's tokens [tokens, layers, 2, heads, head_dim]."""
    follower = drafter._followers[request.request_id]
    assert follower.num_computed == request.num_tokens
    slots = [slot_at(follower.block_ids, place, BLOCK) for place in range(request.num_tokens)]
    return by_slot(drafter._runner.kv_cache, CONFIG["head_dim"])[slots]


def mixed_requests() -> list[Request]:
    """Shared prompts of two tenants, sampled and greedy, one that meets the context's end."""
    long = tuple(index * 5 % VOCAB for index in range(140))
    prompt = (*PROMPT, 3, 1) * 2
    return [
        Request("a", prompt, params(temperature=1.0, max_tokens=60), cache_salt="one"),
        Request("b", prompt, params(max_tokens=60), cache_salt="two"),
        Request("d", (5, 8, 2) * 9, params(temperature=0.7, max_tokens=60)),
        Request("e", prompt, params(max_tokens=12), cache_salt="one"),
        Request("c", long, params(max_tokens=500)),
    ]


@pytest.mark.parametrize("num_blocks", [30, 9])
def test_its_keys_and_values_are_those_of_the_committed_tokens(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through preemption, an abort, prefix hits, the context's end and a full pool of its own."""
    monkeypatch.setattr(small_model, "CHUNK", 24)
    drafter = Checked(noise=0.1, num_blocks=num_blocks)
    engine = toy_engine(drafter=drafter, node_budget=6, num_blocks=11, token_budget=32)
    wanted = {}
    for request in mixed_requests():
        run_all(toy_engine(prefix_cache=False), [request])
        wanted[request.request_id] = request.output_ids
    requests = mixed_requests()
    num_preempted = num_abandoned = step = 0
    plan, abandon = engine.scheduler.plan, drafter._abandon

    def planned(budgets: Any) -> Any:
        nonlocal num_preempted
        made = plan(budgets)
        num_preempted += len(made.preempted)
        return made

    def abandoned(follower: Any) -> None:
        nonlocal num_abandoned
        num_abandoned += 1
        abandon(follower)

    monkeypatch.setattr(engine.scheduler, "plan", planned)
    monkeypatch.setattr(drafter, "_abandon", abandoned)
    while engine.has_work or step < 12:
        for index, request in enumerate(requests):
            if step == index:
                engine.add(request)
        if step == 11:
            engine.abort("d")
        engine.step()
        check_pool(engine)
        check_drafter(engine.drafter)
        step += 1
    for request in requests:
        length = len(request.output) if request.finish_reason == "abort" else None
        assert request.output_ids == wanted[request.request_id][:length]
    assert [r.finish_reason for r in requests] == ["length", "length", "abort", "length", "length"]
    assert requests[-1].num_tokens == toy_model().max_model_len
    assert drafter.num_compared > 20 and num_preempted > 0
    # "e" shares with "a", "b" of another tenant with nobody; a small pool may have forgotten.
    assert drafter.num_hits == 1 if num_blocks == 30 else drafter.num_hits <= 1
    assert (num_abandoned > 0 and drafter.num_root_only > 0) == (num_blocks == 9)
    assert num_held(engine.drafter) == 0 and sum(r.stats.num_accepted for r in requests) > 10


def test_prompts_are_shared_within_a_tenant_only() -> None:
    drafter = drafter_of()
    computed = {}
    for name, salt in [("a", "one"), ("b", "two"), ("c", "one"), ("d", "")]:
        request = Request(name, PROMPT * 2, params(), cache_salt=salt)
        drafter.admit(request)
        computed[name] = drafter._followers[name].num_computed
        drafter.draft([DecodeStep(request, 4)])
    assert computed == {"a": 0, "b": 0, "c": 32, "d": 0}
    drafter.pool.check([follower.block_ids for follower in drafter._followers.values()])


def test_a_pool_that_is_full_gives_root_only_trees_and_takes_from_the_idle() -> None:
    drafter = drafter_of(num_blocks=5)
    requests = [Request(name, PROMPT * 2, params(), cache_salt=name) for name in "abc"]
    for request in requests:
        drafter.admit(request)
    a, b, c = (DecodeStep(request, 4) for request in requests)
    both = [tree.num_nodes > 1 for tree in drafter.draft([a, b])]  # three blocks each
    assert both == [True, False]
    assert drafter.draft([b])[0].num_nodes > 1  # "a" is idle and gives its blocks up
    assert drafter._followers["a"].block_ids == [] and drafter._followers["a"].num_computed == 0
    assert [tree.num_nodes > 1 for tree in drafter.draft([c, a])] == [True, False]
    too_long = DecodeStep(requests[0], toy_model().max_model_len)
    assert drafter.draft([too_long])[0].num_nodes == 1
    for request in requests:
        drafter.release(request)
        drafter.release(request)  # as after a fault
    assert num_held(drafter) == 0


def test_asked_twice_it_says_the_same() -> None:
    """As happens when the guards find out whose fault it was."""
    drafter = drafter_of()
    requests = [Request(name, PROMPT, params(temperature=1.0)) for name in "ab"]
    for request in requests:
        drafter.admit(request)
    steps = [DecodeStep(request, 6) for request in requests]
    both = drafter.draft(steps)
    assert drafter.draft(steps) == both
    assert [drafter.draft([step])[0] for step in steps] == both


def test_long_prompts_are_computed_in_chunks_to_the_same_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = DecodeStep(Request("a", PROMPT * 4, params()), 8)
    drafted = []
    for chunk in (256, 7):
        monkeypatch.setattr(small_model, "CHUNK", chunk)
        drafter = drafter_of()
        drafter.admit(step.request)
        drafted += drafter.draft([step])
    assert drafted[0] == drafted[1] and drafted[0].num_nodes == 9


def test_its_memory_is_taken_from_the_kv_cache() -> None:
    per_block = toy_model().model.kv_bytes_per_block("auto", BLOCK)
    own_block = toy_draft_model(backend_of(toy_model()), 0.0).model.kv_bytes_per_block(
        "auto", BLOCK
    )
    small, large = drafter_of(num_blocks=10), drafter_of(num_blocks=60)
    assert large.num_bytes - small.num_bytes == 50 * own_block
    assert small.num_bytes > 10 * own_block  # and its weights
    for drafter in (small, large):
        engine = toy_engine(drafter=drafter)
        assert engine.drafter.num_bytes == drafter.num_bytes
        assert engine.pool.num_blocks == (4 * 2**20 - drafter.num_bytes) // per_block


def test_where_it_leaves_too_little_the_error_says_how_much_is_needed() -> None:
    drafter = drafter_of(num_blocks=300)
    with pytest.raises(
        UsageError, match=r"beside \d+ MiB of drafters; give at least (\d+) MiB"
    ) as e:
        toy_engine(drafter=drafter, kv_memory_mib=1)
    words = str(e.value).split()
    needed = int(words[words.index("least") + 1])
    assert toy_engine(drafter=drafter, kv_memory_mib=needed).pool.num_blocks >= 160 // BLOCK
    with pytest.raises(UsageError):
        toy_engine(drafter=drafter, kv_memory_mib=needed - 1)
