"""The device path, whole: the same tokens as on the CPU, whatever is drafted, and equal logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from specdec.cuda_graphs import Step
from specdec.device_forward import DeviceForward
from specdec.device_verifier import DeviceVerifier
from specdec.kv_cache import KVCache
from specdec.loading import LoadedModel
from specdec.model_runner import ModelRunner
from specdec.params import SamplingParams
from specdec.plan import DecodeStep, PrefillChunk, StepPlan
from specdec.request import Request, RequestOutput
from specdec.tree import DraftTree, TreeBuilder
from specdec.verifier import HostVerifier
from tests.kernels.device import DEVICE, needs_gpu
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

    def break_one(batch: object) -> Tensor:
        logits = forward(batch).clone()  # type: ignore[arg-type]  # what the engine hands over
        logits[0, 5] = float("nan")
        return logits

    with patch.object(engine.runner, "forward", break_one):
        outputs = engine.step()
    while engine.has_work:
        outputs += engine.step()
    ends = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert ends == {"broken": "error", "fine": "length"}


# --- logits ---


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
        return self.runner.forward(self.runner.pack(plan, [tree])).clone()


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
    forward = DeviceForward(toy_device_model().model, Session(toy_device_model(), [1]).kv_cache)
    session = Session(toy_device_model(), [1, 2, 3])
    plan = StepPlan((PrefillChunk(session.request, 0, 2),), (DecodeStep(session.request, 0),))
    batch = session.runner.pack(plan, [DraftTree.root_only(3)])
    sizes = forward.sizes(batch)
    assert (sizes.num_rows, sizes.num_logits) == (8, 8)
    fast = DeviceForward(toy_device_model(is_deterministic=False).model, session.kv_cache)
    sizes = fast.sizes(batch)
    assert (sizes.num_rows, sizes.num_logits) == (4, 1)
    assert not sizes.shape.is_deterministic
    assert dataclasses.replace(sizes) == sizes and hash(sizes)  # a key of recorded steps


class Ledger:
    """Keeps the sizes of what is recorded."""

    def __init__(self) -> None:
        self.count = 0

    def record(self, step: Step) -> Step:
        self.count += 1
        return step


@MODES
def test_a_lone_stream_finds_its_steps_recorded(is_deterministic: bool) -> None:
    """After the warm-up a short stream records nothing new: no compilation in its way."""
    loaded = toy_device_model(is_deterministic=is_deterministic)
    session, ledger = Session(loaded, [1, 2, 3, 4, 5]), Ledger()
    session.kv_cache.data.zero_()  # as it is when an engine starts
    forward = DeviceForward(loaded.model, session.kv_cache, ledger)
    forward.warm_up(node_budget=3, token_budget=4)
    recorded = ledger.count
    assert recorded >= 2  # pinned rows need few sizes
    session.runner.__dict__["_on_device"] = forward
    session.step(DraftTree.root_only(5))
    session.step(DraftTree.from_paths(5, [[6, 7, 8]], source="x", node_budget=3))
    session.step(DraftTree.from_paths(5, [[6], [7], [8]], source="x", node_budget=3))
    assert ledger.count == recorded


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
