"""Speculation never changes the answer: equality with the request run alone, without drafts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.drafting import Drafter
from specdec.limits import NO_LIMITS, DraftLimits, SpeculationLimits
from specdec.native_sampling import NativeSampling, Walk
from specdec.native_verifier import NativeVerifier
from specdec.params import SamplingParams
from specdec.plan import StepPlan
from specdec.request import Request, RequestOutput
from specdec.sampling import Sampler
from specdec.scheduler import Scheduler
from specdec.tree import DraftTree
from tests.any_params import VOCAB, params_strategy, tokens
from tests.drafters.toy_drafters import (
    COMPOSITIONS,
    NAMES,
    check_drafter,
    num_held,
    toy_drafters,
)
from tests.native_session import native_library
from tests.toy import (
    Form,
    TruthDrafter,
    check_pool,
    run_all,
    toy_engine,
    toy_model,
)
from tests.toy_controllers import CONTROLS, controller_for
from tests.wrong_rule import verify_by

pytestmark = pytest.mark.usefixtures("backend")


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and when it is aborted (in steps)."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    step: int
    priority: int
    abort_after: int | None
    salt: str = ""
    speculation: SpeculationLimits = NO_LIMITS

    def request(self, index: int, prediction_ids: Sequence[int] = ()) -> Request:
        return Request(
            f"r{index}",
            self.prompt_ids,
            self.params,
            priority=self.priority,
            cache_salt=self.salt,
            speculation=self.speculation,
            prediction_ids=tuple(prediction_ids),
        )


shared_prefix = tuple(index * 7 % VOCAB for index in range(50))
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=30).map(tuple),
    st.integers(10, 50).map(lambda n: shared_prefix[:n]),  # prefix hits
    st.lists(tokens, min_size=2, max_size=4).map(lambda p: tuple(p * 8)),  # n-gram matches
)
arrivals = st.lists(
    st.builds(
        Arrival,
        prompt_ids=prompts,
        params=params_strategy,
        step=st.integers(0, 6),
        priority=st.integers(0, 1),
        abort_after=st.none() | st.none() | st.integers(0, 12),
        salt=st.sampled_from(["", "", "other"]),
        speculation=st.builds(
            SpeculationLimits,
            max_nodes=st.sampled_from([None, None, 0, 1, 6]),
            max_depth=st.sampled_from([None, None, 1, 3]),
            drafters=st.sampled_from([None, None, (), ("truth",), ("ngram", "suffix")]),
        ),
    ),
    min_size=1,
    max_size=8,
)


@dataclass
class Answer:
    """What a request's outputs add up to."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)

    def add(self, output: RequestOutput) -> None:
        self.token_ids += [t.token_id for t in output.tokens]
        self.logprobs += [(t.logprob, t.top_logprobs) for t in output.tokens]
        if output.finish_reason is not None:
            self.endings.append(output.finish_reason)


def alone(arrival: Arrival, index: int) -> Answer:
    """The oracle: no drafts, no neighbours, no chunks, no prefix cache."""
    engine = toy_engine(prefix_cache=False)
    answer = Answer()
    for output in run_all(engine, [arrival.request(index)]):
        answer.add(output)
    return answer


def drafter_for(
    name: str, truth: dict[str, list[int]], seed: int, num_draft_blocks: int
) -> Drafter | None:
    if name == "none":
        return None
    if name in ("truth", "random"):
        return TruthDrafter(truth if name == "truth" else {}, seed, hit_rate=0.8)
    return toy_drafters(name, num_blocks=num_draft_blocks)


def predictions(expected: Sequence[Answer], rng: random.Random) -> list[list[int]]:
    """For two requests of three the true answer with some of it replaced, inserted and left out."""
    made = []
    for answer in expected:
        text = list(answer.token_ids) if rng.random() < 0.7 else []
        for _ in range(len(text) // 8):
            place = rng.randrange(len(text))
            text[place : place + rng.randrange(3)] = [rng.randrange(VOCAB)] * rng.randrange(3)
        made.append(text)
    return made


any_mix = given(
    mix=arrivals,
    drafter=st.sampled_from(["none", "truth", "truth", "random", *NAMES, *COMPOSITIONS]),
    node_budget=st.sampled_from([0, 1, 5, 20, 40]),
    token_budget=st.sampled_from([4, 23, 256]),
    num_blocks=st.sampled_from([10, 13, 80]),
    max_running=st.sampled_from([1, 3, 8]),
    prefix_cache=st.booleans(),
    seed=st.integers(0, 1000),
    num_draft_blocks=st.sampled_from([3, 12, 60]),
    control=st.sampled_from(CONTROLS),
)


def check_mix(
    mix: list[Arrival],
    drafter: str,
    node_budget: int,
    token_budget: int,
    num_blocks: int,
    max_running: int,
    prefix_cache: bool,
    seed: int,
    num_draft_blocks: int,
    control: str,
) -> None:
    expected = [alone(arrival, index) for index, arrival in enumerate(mix)]
    truth = {f"r{index}": answer.token_ids for index, answer in enumerate(expected)}
    drafts = drafter_for(drafter, truth, seed, num_draft_blocks)
    engine = toy_engine(
        drafter=drafts,
        controller=controller_for(control, drafts, node_budget, seed),
        node_budget=node_budget,
        token_budget=token_budget,
        num_blocks=num_blocks,
        max_running=max_running,
        prefix_cache=prefix_cache,
    )
    predicted = predictions(expected, random.Random(seed))
    got = {f"r{index}": Answer() for index in range(len(mix))}
    step = 0
    while engine.has_work or step <= max(a.step for a in mix):
        for index, arrival in enumerate(mix):
            if arrival.step == step:
                engine.add(arrival.request(index, predicted[index]))
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                engine.abort(f"r{index}")
        for output in engine.step():
            got[output.request_id].add(output)
        check_pool(engine)
        check_drafter(engine.drafter)
        step += 1
        assert step < 2000, "no progress"
    assert num_held(engine.drafter) == 0
    for answer, want in zip(got.values(), expected, strict=True):
        assert len(answer.endings) == 1
        if answer.endings == ["abort"]:
            length = len(answer.token_ids)
            assert answer.token_ids == want.token_ids[:length]
            assert answer.logprobs == want.logprobs[:length]
        else:
            assert answer == want


def test_any_mix_gives_the_answer_of_the_request_alone() -> None:
    settings(max_examples=60, deadline=None)(any_mix(check_mix))()


def biased(
    tree: DraftTree, node: int, logits: Tensor, sampler: Sampler, output_ids: Sequence[int]
) -> tuple[int | None, int]:
    """A wrong rule: takes any child the target finds likely, whatever the target chose."""
    survivors = sampler.survivors(logits, output_ids).dense(len(logits))
    for child in tree.children[node]:
        if survivors[tree.token_ids[child]] > 0.1:
            return child, tree.token_ids[child]
    token_id = sampler.choose(logits, output_ids)
    return None, token_id


def check_fixed_mix(drafter: str = "random", control: str = "fixed") -> None:
    """The property on one fixed mix, large enough that a wrong rule must show in it."""
    params = [SamplingParams(max_tokens=40, temperature=1.0, seed=seed) for seed in range(8)]
    limits = (NO_LIMITS, SpeculationLimits(max_nodes=0), SpeculationLimits(max_depth=2))
    check_mix(
        mix=[
            Arrival((1, 2, 3), each, 0, 0, None, speculation=limits[index % 3])
            for index, each in enumerate(params)
        ],
        drafter=drafter,
        control=control,
        node_budget=40,
        token_budget=256,
        num_blocks=80,
        max_running=8,
        prefix_cache=True,
        seed=0,
        num_draft_blocks=60,
    )


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("drafter", ["truth", "random", "suffix,medusa"])
def test_so_it_is_whatever_the_controller_decides(control: str, drafter: str) -> None:
    """Fixed: requests that take all, some and no drafts side by side."""
    check_fixed_mix(drafter, control)


def test_a_biased_verifier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed, because a mix drawn at random may happen to give the wrong rule no chance."""
    check_fixed_mix()
    verify_by(biased, monkeypatch)
    with pytest.raises(AssertionError):
        check_fixed_mix()


def test_a_biased_native_walk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, walk = NativeVerifier(native_library()), NativeSampling.walk

    def to_any_child(
        self: NativeSampling, address: int, stride: int, size: int, tree: DraftTree, position: int
    ) -> Walk | None:
        right = walk(self, address, stride, size, tree, position)
        if right is None or right.path or tree.num_nodes == 1:
            return right
        return Walk((tree.token_ids[1], *right.token_ids), (1,))

    monkeypatch.setattr("specdec.engine.make_verifier", lambda rule, device: verifier)
    check_fixed_mix()
    monkeypatch.setattr(NativeSampling, "walk", to_any_child)
    with pytest.raises(AssertionError):
        check_fixed_mix()


PRECISIONS = [
    Form("native", "bf16", "bf16"),
    Form("native", "bf16", "int8"),
    Form("native", "int8", "bf16"),
    Form("native", "int4", "int8"),
]


@pytest.mark.parametrize("drafter", ["none", "truth", "ngram"])
@pytest.mark.parametrize("backend", PRECISIONS, indirect=True, ids=str)
def test_so_it_is_in_every_precision(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target then is the rounded model; that it is one function of the path does not change."""
    check_busy_mix(drafter, monkeypatch)


@pytest.mark.parametrize("drafter", [*NAMES, *COMPOSITIONS])
def test_so_it_is_with_every_drafter(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed, so that each lives through preemption, an abort, hits and the context's end."""
    check_busy_mix(drafter, monkeypatch)


def check_busy_mix(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mix in which everything happens that can happen to a request, with little and much room."""
    plans: list[StepPlan] = []
    make_plan = Scheduler.plan

    def plan(self: Scheduler, limits: Mapping[str, DraftLimits]) -> StepPlan:
        plans.append(make_plan(self, limits))
        return plans[-1]

    monkeypatch.setattr(Scheduler, "plan", plan)
    drawn = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True, logprobs=2)
    greedy = dataclasses.replace(drawn, temperature=0.0)
    mix = [
        Arrival(shared_prefix, drawn, 0, 0, None),
        Arrival((5, 8, 2) * 8, greedy, 0, 1, None),
        Arrival(shared_prefix[:40], greedy, 3, 0, None),
        Arrival((9,), drawn, 4, 1, 9),
        Arrival(shared_prefix[:33], drawn, 30, 1, None),
        Arrival(shared_prefix[:40], drawn, 3, 0, None, "other"),
        Arrival(shared_prefix * 3, drawn, 5, 0, None),
    ]
    check_mix(mix, drafter, 2, 23, 10, 8, True, 3, 12, "fixed")  # slow, so that many want blocks
    for control in ("fixed", "free rows"):
        check_mix(mix, drafter, 20, 256, 80, 8, True, 3, 60, control)
    chunks = [chunk for plan in plans for chunk in plan.prefill_chunks]
    assert any(plan.preempted for plan in plans)
    assert any(chunk.request.num_prefix_hit > 0 for chunk in chunks)
    assert any(chunk.start > chunk.request.num_prefix_hit for chunk in chunks)
    steps = [step for plan in plans for step in plan.decode_steps]
    assert any(step.request.num_tokens >= toy_model().max_model_len - 1 for step in steps)
    accepted = [step.request.stats.accepted_by_source for step in steps]
    for name in set(drafter.split(",")) - {"none"}:
        assert any(counts[name] > 0 for counts in accepted)
