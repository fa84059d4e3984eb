"""FixedBudget: what it notes of each step is what the step was and what came of it."""

from __future__ import annotations

from specdec.decision import Reason
from specdec.params import SamplingParams
from specdec.request import Request
from tests.toy import TruthDrafter, run_all, toy_engine


def test_a_fixed_budget_notes_what_came_of_each_step() -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    plain = Request("r", (1, 2, 3), params)
    run_all(toy_engine(), [plain])
    request = Request("r", (1, 2, 3), params, keeps_steps=True)
    engine = toy_engine(drafter=TruthDrafter({"r": plain.output_ids}, 0, 0.9), node_budget=4)
    run_all(engine, [request])
    decisions = list(engine.controller.decisions)
    assert [one.step for one in decisions] == list(range(len(request.steps)))
    for one, step in zip(decisions, request.steps, strict=True):
        assert (one.reason, one.num_requests) == (Reason.FIXED, 1)
        assert one.num_candidates == sum(step.offered)
        assert one.num_nodes == sum(step.verified) <= 4
        assert one.num_rows >= one.num_nodes + 1
        assert (one.predicted_tokens, one.predicted_s, one.plain_s) == (1.0, 0.0, 0.0)
        assert one.observed_tokens == step.num_accepted + step.num_cut + 1
        assert one.observed_s is not None and one.observed_s > 0
    assert any(one.num_nodes for one in decisions)
