"""The NativeVerifier's verdicts are those of the HostVerifier without a native library."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import noise
from specdec.host_verifier import HostVerifier
from specdec.kernels.batch import Batch
from specdec.native_verifier import NativeVerifier
from specdec.params import SamplingParams
from specdec.plan import DecodeStep, StepPlan
from specdec.request import Request, TokenRecord
from specdec.sampling import Sampler
from specdec.tree import DraftTree
from specdec.verifier import make_verifier
from tests.native_session import choosing_natively

VOCAB = 5  # few tokens, so that trees are walked deep
tokens = st.integers(0, VOCAB - 1)
params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 0, 3]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    bad_words=st.sampled_from([(), (), ((1,),)]),
    allowed_token_ids=st.sampled_from([None, None, frozenset({2})]),
    min_tokens=st.sampled_from([0, 0, 3]),
    logprobs=st.sampled_from([None, None, 2]),
)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[ctypes.CDLL]:
    with choosing_natively() as loaded:
        yield loaded


@st.composite
def requests_and_trees(draw: st.DrawFn) -> tuple[list[Request], list[DraftTree]]:
    requests, trees = [], []
    for index in range(draw(st.integers(0, 3))):
        prompt = tuple(draw(st.lists(tokens, min_size=1, max_size=4)))
        request = Request(f"r{index}", prompt, draw(params_strategy))
        for token_id in draw(st.lists(tokens, max_size=4)):
            request.append(TokenRecord(token_id, (), 1, 0), ())
        paths = draw(st.lists(st.lists(tokens, min_size=1, max_size=5), max_size=6))
        requests.append(request)
        trees.append(DraftTree.from_paths(1, paths, source="toy", node_budget=12))
    return requests, trees


@given(
    given_=requests_and_trees(),
    seed=st.integers(0, 2**64 - 1),
    scale=st.sampled_from([0.0, 1.0, 3.0]),
    gap=st.sampled_from([0, 3]),
    is_half=st.booleans(),
    broken=st.none() | st.tuples(st.integers(0, 40), tokens, st.sampled_from([math.nan, math.inf])),
)
@settings(max_examples=500, deadline=None)
def test_verdicts(
    library: ctypes.CDLL,
    given_: tuple[list[Request], list[DraftTree]],
    seed: int,
    scale: float,
    gap: int,
    is_half: bool,
    broken: tuple[int, int, float] | None,
) -> None:
    requests, trees = given_
    ends = [0]
    for tree in trees:
        ends.append(ends[-1] + tree.num_nodes)
    wide = torch.randn(ends[-1], VOCAB + gap, generator=torch.Generator().manual_seed(seed % 2**40))
    logits = wide[:, :VOCAB] * 1.0 if gap == 0 else wide[:, :VOCAB]
    logits *= scale
    if broken is not None and broken[0] < len(logits):
        logits[broken[0], broken[1]] = broken[2]
    if is_half:
        logits = logits.bfloat16()
    plan = StepPlan((), tuple(DecodeStep(request, 12) for request in requests))
    batch = Batch((), (), (), (), (), tuple(ends))
    samplers = {
        request.request_id: Sampler(
            request.params, request.prompt_ids, seed=seed, eos_token_ids=(4,)
        )
        for request in requests
    }
    native = NativeVerifier(library).verify(plan, trees, logits, batch, samplers)
    noise.use_native(None)
    try:
        assert HostVerifier("coupled").verify(plan, trees, logits, batch, samplers) == native
    finally:
        noise.use_native(library)


def test_who_verifies(library: ctypes.CDLL) -> None:
    cpu = torch.device("cpu")
    assert isinstance(make_verifier("coupled", cpu), NativeVerifier)
    assert not isinstance(make_verifier("rejection", cpu), NativeVerifier)
    noise.use_native(None)
    try:
        assert not isinstance(make_verifier("coupled", cpu), NativeVerifier)
    finally:
        noise.use_native(library)
