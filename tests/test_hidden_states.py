"""Hidden states: what drafters are told of them is what the target's head has read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.composite import CompositeDrafter
from specdec.drafters.null import NullDrafter
from specdec.kernels.batch import Batch
from specdec.params import SamplingParams
from specdec.request import Request
from specdec.target import TargetOutput
from specdec.verification import Verdict
from tests.toy import ALPHABET, CONFIG, RandomTensors, TruthDrafter, run_all, toy_engine

pytestmark = pytest.mark.usefixtures("backend")

PROMPTS = {"a": (3, 1, 4, 1, 5), "b": (2, 7, 1, 8)}


def requests_of(*names: str) -> list[Request]:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    return [Request(name, PROMPTS[name], params) for name in names]


class WatchfulDrafter(TruthDrafter):
    """Wants the target's states, and keeps them with the verdicts they belong to."""

    needs_hidden = True

    def __init__(self, truth: dict[str, list[int]]) -> None:
        super().__init__(truth, seed=3, hit_rate=0.8)
        self.seen: list[tuple[Verdict, Tensor]] = []

    def observe(self, request: Request, verdict: Verdict, hidden: Tensor | None) -> None:
        assert hidden is not None
        self.seen.append((verdict, hidden.clone()))


class BlindDrafter(NullDrafter):
    """Wants none."""

    num_seen = 0

    def observe(self, request: Request, verdict: Verdict, hidden: Tensor | None) -> None:
        assert hidden is None
        self.num_seen += 1


def test_states_are_those_of_the_root_and_of_the_accepted_nodes() -> None:
    truths = {}
    for name in PROMPTS:
        (alone,) = requests_of(name)
        run_all(toy_engine(), [alone])
        truths[name] = alone.output_ids
    watchful, blind = WatchfulDrafter(truths), BlindDrafter()
    composite = CompositeDrafter([watchful, blind], vocab_size=len(ALPHABET))
    assert composite.needs_hidden
    engine = toy_engine(drafter=composite, node_budget=12)
    steps: list[tuple[Batch, TargetOutput]] = []
    forward = engine.runner.forward

    def recorded(batch: Batch) -> TargetOutput:
        output = forward(batch)
        steps.append((batch, TargetOutput(output.logits.clone(), output.hidden.clone())))
        return output

    engine.runner.forward = recorded  # type: ignore[method-assign]  # to see what the engine does
    requests = requests_of(*PROMPTS)
    run_all(engine, requests)
    head = RandomTensors(CONFIG, 0).get("model.embed_tokens.weight")  # tied
    seen = iter(watchful.seen)
    num_branched = 0
    for batch, output in steps:
        for first in batch.first_logit[:-1]:
            verdict, hidden = next(seen)
            rows = [first + node for node in verdict.rows]
            assert hidden.shape == (verdict.accepted_length + 1, CONFIG["hidden_size"])
            assert hidden.dtype == torch.float32
            # Each side adds up 32 products in fp32, in an order of its own.
            bound = 2 * (32 + 2) * 2.0**-24 * (hidden.abs() @ head.abs().t())
            assert ((hidden @ head.t() - output.logits[rows]).abs() <= bound).all()
            assert (hidden @ head.t()).argmax(1).tolist() == list(verdict.token_ids)
            num_branched += any(node != depth + 1 for depth, node in enumerate(verdict.path))
    assert next(seen, None) is None and num_branched > 3
    assert blind.num_seen == len(watchful.seen)
    assert {request.request_id: request.output_ids for request in requests} == truths
    assert not engine.drafter.num_faults and not composite.num_faults
