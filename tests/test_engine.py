"""Engine: how requests begin and end, and that none of them disturbs another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafting import Drafter
from specdec.engine import Engine
from specdec.errors import ContextLengthExceeded, InvalidRequest
from specdec.kernels.batch import Batch
from specdec.limits import SpeculationLimits
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request, RequestOutput
from specdec.target import TargetOutput
from specdec.tree import DraftTree
from specdec.verification import Verdict
from tests.cache_contents import contents, poison
from tests.toy import ALPHABET, EOS, TruthDrafter, check_pool, run_all, toy_engine, toy_model

pytestmark = pytest.mark.usefixtures("backend")

VOCAB = len(ALPHABET)
PROMPT = (3, 1, 4, 1, 5)


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **settings})


def truth_of(prompt: Sequence[int], **settings: Any) -> list[int]:
    """Plain decoding, alone."""
    request = Request("alone", tuple(prompt), params(**settings))
    run_all(toy_engine(), [request])
    return request.output_ids


class ChainDrafter(Drafter):
    """Drafts the given continuation as one chain, as far as the budget goes, ends included."""

    name = "chain"

    def __init__(self, truth: Sequence[int]) -> None:
        self.truth = list(truth)
        self.calls: list[str] = []

    def admit(self, request: Request) -> None:
        self.calls.append("admit")

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        return [
            DraftTree.from_paths(
                step.root,
                [self.truth[len(step.request.output) :]],
                source=self.name,
                node_budget=step.node_budget,
            )
            for step in steps
        ]

    def observe(self, request: Request, verdict: Verdict, hidden: Tensor | None) -> None:
        self.calls.append("observe")

    def release(self, request: Request) -> None:
        self.calls.append("release")


def drain(engine: Engine, limit: int = 500) -> list[RequestOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        check_pool(engine)
        limit -= 1
        assert limit > 0, "no progress"
    return outputs


def endings(outputs: Sequence[RequestOutput], name: str) -> list[str | None]:
    return [o.finish_reason for o in outputs if o.request_id == name and o.finish_reason]


def is_clean(engine: Engine) -> bool:
    free = engine.pool.num_free + len(getattr(engine, "spare", []))
    return (
        not (engine.has_work or engine._samplers or engine.scheduler.requests)
        and free == engine.pool.num_blocks
    )


@pytest.mark.parametrize("steps_before", [0, 1, 2, 6])
def test_abort_in_any_state_ends_once_and_changes_no_neighbour(steps_before: int) -> None:
    drafter = ChainDrafter([])
    engine = toy_engine(drafter=drafter, token_budget=8, node_budget=0)
    neighbour = Request("n", (9, 2), params(temperature=1.0, seed=1))
    engine.add(neighbour)
    engine.add(Request("x", tuple(range(20)), params()))
    outputs = [o for _ in range(steps_before) for o in engine.step()]
    target = engine._requests["x"]
    state = (target.num_computed > 0, bool(target.output))
    assert state == {0: (False, False), 6: (True, True)}.get(steps_before, (True, False))
    engine.abort("x")
    check_pool(engine)
    engine.abort("x")
    engine.abort("never heard of")
    outputs += drain(engine)
    assert endings(outputs, "x") == ["abort"] and endings(outputs, "n") == ["length"]
    assert neighbour.output_ids == truth_of((9, 2), temperature=1.0, seed=1)
    assert drafter.calls.count("release") == drafter.calls.count("admit") == 2
    engine.abort("x")
    assert engine.step() == [] and is_clean(engine)


def test_the_last_output_of_an_abort_has_its_statistics_and_the_id_is_free() -> None:
    engine = toy_engine()
    engine.add(Request("x", PROMPT, params()))
    for _ in range(3):
        engine.step()
    engine.abort("x")
    assert engine.has_work
    engine.add(Request("x", PROMPT, params(max_tokens=2)))  # at once
    first, *rest = engine.step()
    assert (first.finish_reason, first.tokens) == ("abort", ())
    assert first.stats is not None and first.stats.num_steps == 3
    assert endings([*rest, *drain(engine)], "x") == ["length"]


# By PyTorch; the toy's logits lie far enough apart for the native forward's rounding not to matter.
TRUTH = truth_of(PROMPT)
FIRST = next(i for i in range(4, 20) if TRUTH[i] not in TRUTH[:i])  # a token new at this place


@pytest.mark.parametrize(
    ("settings", "length", "reason"),
    [
        ({"max_tokens": FIRST}, FIRST, "length"),
        ({"max_tokens": 1}, 1, "length"),
        ({"stop_token_ids": frozenset({TRUTH[FIRST]})}, FIRST + 1, "stop"),
        ({"stop": (ALPHABET[TRUTH[FIRST]],)}, FIRST + 1, "stop"),
    ],
)
def test_the_end_in_the_middle_of_an_accepted_path_cuts_everything(
    settings: dict[str, Any], length: int, reason: str
) -> None:
    engine = toy_engine(drafter=ChainDrafter(TRUTH), node_budget=19)
    outputs = run_all(engine, [Request("x", PROMPT, params(logprobs=1, **settings))])
    records = [t for o in outputs for t in o.tokens]
    assert [t.token_id for t in records] == TRUTH[:length]
    assert endings(outputs, "x") == [reason]
    assert all(t.logprob is not None and len(t.top_logprobs) == 1 for t in records)
    stats = outputs[-1].stats
    assert stats is not None and stats.num_steps == 1
    # The tree held more of the true text, but what was cut was not accepted.
    assert stats.num_accepted == sum(t.sources == ("chain",) for t in records)
    assert stats.accepted_lengths == {stats.num_accepted: 1}
    assert stats.accepted_by_source.total() == stats.num_accepted
    assert length == 1 or stats.num_draft_tokens > stats.num_accepted
    assert is_clean(engine)


def test_end_token_in_the_middle_of_an_accepted_path() -> None:
    biased = {"logit_bias": {EOS: 6.0}}
    truth = truth_of(PROMPT, **biased)
    assert EOS in truth[:-2]
    engine = toy_engine(drafter=ChainDrafter(truth), node_budget=19)
    ends, goes_on = (Request(str(f), PROMPT, params(ignore_eos=f, **biased)) for f in (False, True))
    outputs = run_all(engine, [ends, goes_on])
    assert ends.output_ids == truth[: truth.index(EOS) + 1]
    assert (ends.finish_reason, goes_on.finish_reason) == ("stop", "length")
    assert goes_on.output_ids == truth
    assert endings(outputs, "False") == ["stop"]


@pytest.mark.parametrize("drafter_seed", range(3))
def test_statistics_add_up(drafter_seed: int) -> None:
    drafter = TruthDrafter({"x": TRUTH}, drafter_seed, hit_rate=0.9)
    engine = toy_engine(drafter=drafter, node_budget=12)
    request = Request("x", PROMPT, params())
    outputs = run_all(engine, [request])
    stats = request.stats
    assert stats.accepted_lengths.total() == stats.num_steps == len(outputs)
    assert sum(n * c for n, c in stats.accepted_lengths.items()) == stats.num_accepted
    # The limit may cut the last path, whose step then has no bonus token.
    is_cut = outputs[-1].tokens[-1].sources == ("truth",)
    assert len(request.output) == stats.num_steps + stats.num_accepted - is_cut
    assert stats.num_accepted == stats.accepted_by_source.total() > 0
    assert stats.num_draft_tokens == stats.drafted_by_source.total() >= stats.num_accepted
    assert stats.tokens_per_step == 1 + stats.num_accepted / stats.num_steps
    for step, output in enumerate(outputs):
        assert [(t.step, t.depth) for t in output.tokens] == [
            (step, depth) for depth in range(1, len(output.tokens) + 1)
        ]


LIMIT = toy_model().max_model_len


@pytest.mark.parametrize(
    ("request_", "error", "param", "says"),
    [
        (lambda: Request("bad", (), params()), InvalidRequest, "prompt", "empty"),
        (
            lambda: Request("bad", (1,) * LIMIT, params()),
            ContextLengthExceeded,
            "prompt",
            f"has {LIMIT} tokens",
        ),
        (lambda: Request("bad", (1, VOCAB), params()), InvalidRequest, "prompt", "between 0 and"),
        (lambda: Request("bad", (-1, 1), params()), InvalidRequest, "prompt", "between 0 and"),
        (lambda: Request("good", (1,), params()), InvalidRequest, "request_id", "'good' is in use"),
        (
            lambda: Request("bad", (1,), params(stop_token_ids=frozenset({VOCAB}))),
            InvalidRequest,
            "stop_token_ids",
            "outside",
        ),
        (
            lambda: Request("bad", (1,), params(logit_bias={-1: 1.0})),
            InvalidRequest,
            "logit_bias",
            "outside",
        ),
    ],
)
def test_a_refused_request_leaves_nothing_behind(
    request_: Callable[[], Request], error: type[InvalidRequest], param: str, says: str
) -> None:
    drafter = ChainDrafter([])
    engine = toy_engine(drafter=drafter)
    good = Request("good", PROMPT, params())
    engine.add(good)
    with pytest.raises(error, match=says) as caught:
        engine.add(request_())
    assert type(caught.value) is error and caught.value.param == param
    assert engine._requests == {"good": good} and list(engine._samplers) == ["good"]
    assert engine.scheduler.requests == [good] and drafter.calls == ["admit"]
    outputs = drain(engine)
    assert good.output_ids == TRUTH and {o.request_id for o in outputs} == {"good"}
    assert is_clean(engine)


def test_nan_logits_fail_one_request_and_leave_the_neighbours_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = {"a": tuple(range(20)), "bad": (*range(16), 7, 8), "c": (9, 2)}
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 5, "logprobs": 2}
    want = {}
    for name in ("a", "c"):
        request = Request(name, prompts[name], params(**settings))
        run_all(toy_engine(), [request])
        want[name] = request.output
    engine = toy_engine(drafter=TruthDrafter({}, 1, hit_rate=0.0), node_budget=4)
    requests = {n: Request(n, prompt, params(**settings)) for n, prompt in prompts.items()}
    forward = engine.runner.forward
    num_steps = 0

    def poisoned(batch: Batch) -> TargetOutput:
        nonlocal num_steps
        num_steps += 1
        output = forward(batch)
        logits = output.logits.clone()
        if num_steps == 3:
            bad = requests["bad"]
            with torch.inference_mode():
                poison(engine.runner.kv_cache, bad.block_ids[-1:])
            index = [r.request_id for r in engine.scheduler.running].index("bad")
            logits[batch.first_logit[index], 5] = torch.nan
        return dataclasses.replace(output, logits=logits)

    monkeypatch.setattr(engine.runner, "forward", poisoned)
    outputs = run_all(engine, list(requests.values()))
    assert endings(outputs, "bad") == ["error"]
    (last,) = [o for o in outputs if o.finish_reason == "error"]
    assert last.error == "logits are not finite" and last.tokens == ()
    for name, records in want.items():
        got = [(t.token_id, t.logprob, t.top_logprobs) for t in requests[name].output]
        assert got == [(t.token_id, t.logprob, t.top_logprobs) for t in records]
    assert contents(engine.runner.kv_cache).isfinite().all()
    assert is_clean(engine)
    # What the erroneous request alone had published is not offered again.
    again = Request("again", prompts["bad"], params(max_tokens=1))
    run_all(engine, [again])
    assert again.num_prefix_hit == 16  # shared with "a", which was sound


def test_what_an_erroneous_request_published_is_not_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = toy_engine()
    forward = engine.runner.forward

    def broken(batch: Batch) -> TargetOutput:
        return dataclasses.replace(output := forward(batch), logits=output.logits * torch.nan)

    monkeypatch.setattr(engine.runner, "forward", broken)
    prompt = tuple(range(20))
    assert run_all(engine, [Request("bad", prompt, params())])[-1].finish_reason == "error"
    monkeypatch.setattr(engine.runner, "forward", forward)
    again = Request("again", prompt, params())
    run_all(engine, [again])
    assert again.num_prefix_hit == 0 and again.output_ids == truth_of(prompt)


@pytest.mark.parametrize("node_budget", [0, 30])
def test_max_tokens_is_clamped_at_the_end_of_the_context(node_budget: int) -> None:
    prompt = tuple(i % VOCAB for i in range(LIMIT - 7))
    truth = truth_of(prompt, max_tokens=7)
    engine = toy_engine(drafter=ChainDrafter([*truth, 1, 2, 3, 4]), node_budget=node_budget)
    request = Request("x", prompt, params(max_tokens=1000))
    outputs = run_all(engine, [request])
    assert request.output_ids == truth and len(truth) == 7
    assert endings(outputs, "x") == ["length"]


def test_priority_goes_first() -> None:
    engine = toy_engine(max_running=1)
    for name, priority in [("low", 2), ("high", 0), ("middle", 1)]:
        engine.add(Request(name, PROMPT, params(max_tokens=2), priority=priority))
    order = [o.request_id for o in drain(engine) if o.finish_reason]
    assert order == ["high", "middle", "low"]


def test_prefix_hits_stay_within_a_salt_and_change_nothing() -> None:
    prompt = tuple(i * 5 % VOCAB for i in range(40))
    engine = toy_engine()
    got = []
    for name, salt in [("a", "one"), ("b", "one"), ("c", "two"), ("d", ""), ("e", "two")]:
        request = Request(name, prompt, params(max_tokens=4), cache_salt=salt)
        (*_, last) = run_all(engine, [request])
        got.append((last.num_prefix_hit, request.output_ids))
    assert [hit for hit, _ in got] == [0, 32, 0, 0, 32]
    assert all(tokens == truth_of(prompt, max_tokens=4) for _, tokens in got)


def test_a_request_with_no_node_budget_gets_no_drafts() -> None:
    engine = toy_engine(drafter=ChainDrafter(TRUTH), node_budget=8)
    drafted = Request("d", PROMPT, params())
    plain = Request("p", PROMPT, params(), speculation=SpeculationLimits(max_nodes=0))
    run_all(engine, [plain, drafted])
    assert drafted.stats.num_steps < 5 and plain.stats.num_steps == len(TRUTH) == 20
    assert plain.output_ids == drafted.output_ids == TRUTH


def test_an_idle_engine_does_nothing() -> None:
    assert toy_engine().step() == [] and not toy_engine().has_work
