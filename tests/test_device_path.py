"""The device path, whole: the same tokens as on the CPU, whatever is drafted, and equal logits."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call, patch

import pytest
import torch
from torch import Tensor

from specdec.cuda_graphs import Recorder
from specdec.device_forward import DeviceForward
from specdec.device_verifier import DeviceVerifier, _rows
from specdec.host_verifier import HostVerifier
from specdec.kernels.batch import Batch
from specdec.kernels.tree_walk import tree_walk
from specdec.kv_cache import KVCache
from specdec.loading import LoadedModel
from specdec.model import TargetModel
from specdec.model_runner import ModelRunner
from specdec.params import SamplingParams
from specdec.plan import DecodeStep, PrefillChunk, StepPlan
from specdec.request import Request, RequestOutput, TokenRecord
from specdec.sampling import Sampler
from specdec.target import TargetOutput
from specdec.tree import DraftTree, TreeBuilder
from tests.kernels.device import DEVICE, needs_gpu, randn
from tests.toy import TruthDrafter, run_all, toy_engine
from tests.toy_device import device_path, toy_device_model

MODES = pytest.mark.parametrize("is_deterministic", [True, False], ids=["fixed", "fast"])


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with device_path():
        yield


def requests() -> list[Request]:
    """Greedy, sampled with truncation, and one whose penalties keep it on the host."""
    kinds = {
        "greedy": SamplingParams(max_tokens=5, ignore_eos=True),
        "sampled": SamplingParams(
            max_tokens=6, temperature=0.9, top_k=15, top_p=0.9, min_p=0.01, seed=3, ignore_eos=True
        ),
        "penalised": SamplingParams(
            max_tokens=5, temperature=1.0, repetition_penalty=1.2, seed=4, logprobs=2
        ),
    }
    prompts = {"greedy": (1, 2, 3, 4) * 5, "sampled": (5, 6), "penalised": (7, 8, 9)}
    return [Request(name, prompts[name], params) for name, params in kinds.items()]


def tokens(outputs: Sequence[RequestOutput]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for output in outputs:
        assert output.finish_reason != "error", output.error
        found.setdefault(output.request_id, []).extend(t.token_id for t in output.tokens)
    return found


@MODES
def test_the_answers_are_those_of_the_cpu(is_deterministic: bool) -> None:
    """Plain and with trees. The toy's logits lie far enough apart for rounding not to matter."""
    with patch("specdec.kernels.dispatch.uses_triton", lambda device: False):
        want = tokens(run_all(toy_engine(), requests()))
    model = toy_device_model(is_deterministic=is_deterministic)
    drafter = TruthDrafter(want, seed=1, hit_rate=0.8)
    engine = toy_engine(model=model, drafter=drafter, node_budget=6)
    assert isinstance(engine._verifier, DeviceVerifier)
    assert tokens(run_all(engine, requests())) == want
    plain = toy_engine(model=model)
    assert tokens(run_all(plain, requests()[:2])) == {n: want[n] for n in ("greedy", "sampled")}


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_other_rules_run_on_the_host(rule: str) -> None:
    engine = toy_engine(model=toy_device_model(), verification=rule)
    assert isinstance(engine._verifier, HostVerifier)
    (output,) = run_all(engine, [Request("r", (1, 2), SamplingParams(max_tokens=1))])
    assert output.finish_reason == "length"


def test_broken_logits_end_their_request_alone() -> None:
    engine = toy_engine(model=toy_device_model())
    for name in ("broken", "fine"):
        engine.add(Request(name, (1, 2, 3), SamplingParams(max_tokens=2, ignore_eos=True)))
    forward = engine.runner.forward

    def break_one(batch: Batch) -> TargetOutput:
        logits = (output := forward(batch)).logits.clone()
        logits[0, 5] = float("nan")
        return dataclasses.replace(output, logits=logits)

    with patch.object(engine.runner, "forward", break_one):
        outputs = engine.step()
    while engine.has_work:
        outputs += engine.step()
    ends = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert ends == {"broken": "error", "fine": "length"}


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 2},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 1.5, "min_p": 0.7},
    {"temperature": 1.0, "repetition_penalty": 1.9},
    {"temperature": 1.0, "logit_bias": {1: 4.0}},
)


def test_verdicts_are_those_of_the_host() -> None:
    """Logits over few tokens, so that guesses are hit and every parameter makes a difference."""
    rng, vocab_size = random.Random(0), 4
    steps, trees, samplers, first_logit = [], [], {}, [0]
    for index in range(49):
        params = SamplingParams(**KINDS[index % len(KINDS)], seed=index, logprobs=index % 3 or None)
        request = Request(f"r{index}", (2, 1), params)
        request.append(TokenRecord(3, ("target",), 1, 0), ())
        request.stats.num_steps = index
        builder, nodes = TreeBuilder(3, index % 8), [0]
        while builder.room:
            node = builder.add(rng.choice(nodes[-2:]), rng.randrange(vocab_size), 0.0, f"x{index}")
            assert node is not None
            nodes.append(node)
        trees.append(builder.build())
        steps.append(DecodeStep(request, 9))
        first_logit.append(first_logit[-1] + trees[-1].num_nodes)
        samplers[request.request_id] = Sampler(
            params, request.prompt_ids, seed=index + 5, eos_token_ids=(0,)
        )
    plan, logits = StepPlan((), tuple(steps)), randn(first_logit[-1], vocab_size, seed=1)
    batch = Batch((), (), (), (), (), tuple(first_logit))
    got, want = (
        verifier.verify(plan, trees, logits, batch, samplers)
        for verifier in (DeviceVerifier(), HostVerifier("coupled"))
    )
    assert DeviceVerifier().verify(StepPlan((), ()), [], logits, batch, {}) == []
    assert sum(len(item.verdict.path) for item in want) > 10
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.step, ours.tree, ours.error) == (theirs.step, theirs.tree, theirs.error)
        assert ours.verdict == theirs.verdict
        for record, other in zip(ours.records, theirs.records, strict=True):
            assert dataclasses.replace(record, logprob=None, top_logprobs=()) == (
                dataclasses.replace(other, logprob=None, top_logprobs=())
            )
            assert record.logprob == pytest.approx(other.logprob)
            assert [pair[0] for pair in record.top_logprobs] == [p[0] for p in other.top_logprobs]


@pytest.mark.parametrize("num_guesses", [0, 1, 2, 4])
def test_columns_of_the_nodes_are_aligned(num_guesses: int) -> None:
    """Whatever their number, so that one compiled form of the kernels serves every step."""
    request = requests()[1]
    sampler = Sampler(request.params, request.prompt_ids, seed=3, eos_token_ids=())
    tree = DraftTree.from_paths(6, [range(num_guesses)], source="x", node_budget=9)
    sampling, *nodes = _rows([DecodeStep(request, num_guesses)], [tree], [sampler], DEVICE)
    columns = [*nodes, *(getattr(sampling, field.name) for field in dataclasses.fields(sampling))]
    assert all(len(column) == tree.num_nodes for column in columns)
    of_integers = [column for column in columns if column.dtype != torch.int64]
    first = min(column.data_ptr() for column in of_integers)
    assert all((column.data_ptr() - first) % 16 == 0 for column in of_integers)


# --- logits ---


def device_forward(
    loaded: LoadedModel, kv_cache: KVCache, recorder: Recorder[TargetOutput] | None = None
) -> DeviceForward:
    assert isinstance(loaded.model, TargetModel)
    return DeviceForward(loaded.model, kv_cache, recorder)


class Session:
    """One request over a cache of its own; `step` gives the logits of a tree's nodes."""

    def __init__(self, loaded: LoadedModel, known: Sequence[int]) -> None:
        shape = loaded.model.config
        self.kv_cache = KVCache(
            num_layers=shape.num_layers,
            num_blocks=12,
            num_kv_heads=shape.num_kv_heads,
            block_size=16,
            head_dim=shape.head_dim,
            dtype=torch.float32,
            device=DEVICE,
        )
        self.kv_cache.data.fill_(float("nan"))  # what is not written must not be read
        self.runner = ModelRunner(loaded.model, self.kv_cache)
        self.request = Request("r", tuple(known), SamplingParams(seed=0))
        self.request.block_ids = [7, 3, 9, 0, 5, 11, 2, 10, 1, 8]

    def step(self, tree: DraftTree, chunk: tuple[int, int] | None = None) -> Tensor:
        chunks = (PrefillChunk(self.request, *chunk),) if chunk else ()
        plan = StepPlan(chunks, (DecodeStep(self.request, tree.num_nodes - 1),))
        return self.runner.forward(self.runner.pack(plan, [tree])).logits.clone()


def test_a_token_has_the_same_logits_however_it_is_computed() -> None:
    """Deterministic mode: drafted among siblings, in a chain, plainly, or in one go; bit for bit.

    The context straddles a tile of keys (64), so that the tree's rows continue a partial softmax.
    """
    loaded = toy_device_model()
    known = [3 * i % 23 for i in range(62)]
    path = [4, 9, 1, 17, 3]
    last = len(known) - 1

    builder = TreeBuilder(known[-1], 12)
    node, nodes = 0, [0]
    for token_id in path:
        builder.add(node, 20, 0.0, "x")  # a wrong sibling, laid first
        child = builder.add(node, token_id, 0.0, "x")
        assert child is not None
        node = child
        nodes.append(node)
    branching = builder.build()
    drafted = Session(loaded, known).step(branching, (0, last))[nodes]

    chain = DraftTree.from_paths(known[-1], [path], source="x", node_budget=9)
    assert torch.equal(Session(loaded, known).step(chain, (0, last)), drafted)

    plainly = Session(loaded, known)
    rows = [plainly.step(DraftTree.root_only(known[-1]), (0, last))]
    for token_id in path[:2]:
        plainly.request.token_ids.append(token_id)
        rows.append(plainly.step(DraftTree.root_only(token_id)))
    assert torch.equal(torch.cat(rows), drafted[:3])

    whole = [*known, *path]
    at_once = Session(loaded, whole).step(DraftTree.root_only(path[-1]), (0, len(whole) - 1))
    assert torch.equal(at_once[-1], drafted[-1])


def test_rows_are_padded_to_the_pinned_number() -> None:
    forward = device_forward(toy_device_model(), Session(toy_device_model(), [1]).kv_cache)
    session = Session(toy_device_model(), [1, 2, 3])
    plan = StepPlan((PrefillChunk(session.request, 0, 2),), (DecodeStep(session.request, 0),))
    batch = session.runner.pack(plan, [DraftTree.root_only(3)])
    sizes = forward.sizes(batch)
    assert batch.segments[-1].ancestors is None  # a chain needs no tail
    assert (sizes.num_rows, sizes.num_logits) == (8, 8)
    assert (sizes.num_tiles, sizes.num_segments) == (4, 4)  # three tiles, padding among them
    assert sizes.shape.is_deterministic
    star = forward._rehearsal(3, 9, num_logits=3, is_tree=True)
    assert forward.sizes(star).num_tails == 4
    fast = device_forward(toy_device_model(is_deterministic=False), session.kv_cache)
    sizes = fast.sizes(batch)
    assert (sizes.num_rows, sizes.num_logits) == (4, 1)
    assert not sizes.shape.is_deterministic
    assert dataclasses.replace(sizes) == sizes and hash(sizes)  # a key of recorded steps


class Ledger:
    """Keeps the sizes of what is recorded."""

    def __init__(self) -> None:
        self.count = 0

    def record(self, step: Callable[[], TargetOutput]) -> Callable[[], TargetOutput]:
        self.count += 1
        return step


@MODES
def test_a_lone_stream_finds_its_steps_recorded(is_deterministic: bool) -> None:
    """After the warm-up a short stream records nothing new: no compilation in its way."""
    loaded = toy_device_model(is_deterministic=is_deterministic)
    session, ledger = Session(loaded, [1, 2, 3, 4, 5]), Ledger()
    session.kv_cache.data.zero_()  # as it is when an engine starts
    forward = device_forward(loaded, session.kv_cache, ledger)
    with (
        patch.object(session.kv_cache, "move", wraps=session.kv_cache.move) as move,
        patch.object(forward, "_rehearsal", wraps=forward._rehearsal) as rehearsal,
        patch("specdec.device_forward._LONG_CONTEXT", 96),
    ):
        forward.warm_up(node_budget=3, token_budget=4)
    assert move.called and {made.args[1] for made in rehearsal.mock_calls} == {96, 160}
    recorded = ledger.count
    assert recorded >= 2  # pinned rows need few sizes
    session.runner.__dict__["_on_device"] = forward
    prompt = StepPlan((PrefillChunk(session.request, 0, 4),), ())
    assert len(session.runner.forward(session.runner.pack(prompt, [])).logits) == 0
    session.step(DraftTree.root_only(5))
    session.step(DraftTree.from_paths(5, [[6, 7, 8]], source="x", node_budget=3))
    session.step(DraftTree.from_paths(5, [[6], [7], [8]], source="x", node_budget=3))
    assert ledger.count == recorded


def test_a_step_of_many_rows_is_launched_unrecorded() -> None:
    """More rows than are worth a recording; the logits are those of the decode step alone."""
    session, ledger = Session(toy_device_model(), [1, 2, 3]), Ledger()
    forward = device_forward(toy_device_model(), session.kv_cache, ledger)
    plan = StepPlan((PrefillChunk(session.request, 0, 2),), (DecodeStep(session.request, 0),))
    batch = session.runner.pack(plan, [DraftTree.root_only(3)])
    recorded = forward(batch).logits.clone()
    with patch("specdec.device_forward.ROW_BUCKETS", (1,)):
        launched = forward(batch).logits
    assert ledger.count == 1
    assert launched.shape == (1, toy_device_model().model.config.vocab_size)
    assert torch.equal(launched, recorded)


def test_an_engine_starts_with_its_kernels_compiled() -> None:
    """Forward (a GPU's only, for an interpreter compiles nothing), choice and walk."""
    model = toy_device_model()
    with (
        patch.object(ModelRunner, "warm_up") as forward,
        patch.object(DeviceVerifier, "warm_up") as verifier,
    ):
        engine = toy_engine(model=model, node_budget=6)
    forward.assert_called_once_with(6, engine.config.token_budget)
    (logits,) = verifier.call_args.args
    assert logits.shape == (1, engine.vocab_size) and logits.dtype == torch.float32
    with patch("specdec.device_verifier.tree_walk", wraps=tree_walk) as walk:
        engine._verifier.warm_up(logits)
    assert walk.call_count == 1


def test_a_runner_on_a_gpu_is_warmed_up() -> None:
    for kind, is_due in (("cuda", True), ("cpu", False)):
        kv_cache = SimpleNamespace(device=torch.device(kind))
        runner = ModelRunner(toy_device_model().model, kv_cache)
        on_device = Mock()
        runner.__dict__["_on_device"] = on_device
        runner.warm_up(6, 64)
        assert on_device.warm_up.mock_calls == ([call(6, 64)] if is_due else [])


@needs_gpu
def test_a_step_waits_once_for_the_device() -> None:
    engine = toy_engine(model=toy_device_model())
    for request in requests()[:2]:
        engine.add(request)
    engine.step()  # records
    engine.step()
    torch.cuda.set_sync_debug_mode("error")  # counts implicit waits; the event is the one allowed
    try:
        engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
