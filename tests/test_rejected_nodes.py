"""Rejected nodes: with the tokens they are the whole trees, and unasked nothing is reported."""

from __future__ import annotations

import pytest

from specdec.metrics import SpeculationStats
from specdec.params import SamplingParams
from specdec.request import Request
from tests.toy import TruthDrafter, run_all, toy_engine

PROMPT = (1, 2, 3)


def truth(params: SamplingParams) -> list[int]:
    request = Request("r", PROMPT, params)
    run_all(toy_engine(), [request])
    return request.output_ids


@pytest.mark.parametrize("max_tokens", [9, 10, 11, 17, 40])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_and_rejected_nodes_are_the_trees(max_tokens: int, seed: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    longer = truth(SamplingParams(max_tokens=60, ignore_eos=True))  # so the limit cuts a path
    drafter = TruthDrafter({"r": longer}, seed, 0.9)
    request = Request("r", PROMPT, params, keeps_rejected=True)
    outputs = run_all(toy_engine(drafter=drafter, node_budget=8), [request])
    rejected = [node for output in outputs for node in output.rejected]
    stats = request.stats
    assert stats.num_draft_tokens == stats.num_accepted + len(rejected)
    assert len(rejected) > 0
    for output in outputs:
        assert {node.step for node in output.rejected} <= {t.step for t in output.tokens}
        chosen = {(t.depth, t.token_id) for t in output.tokens if t.sources != ("target",)}
        assert all(node.sources == ("truth",) for node in output.rejected)
        first = {node.token_id for node in output.rejected if node.depth == 1}
        assert not first & {token for depth, token in chosen if depth == 1}, "siblings differ"
        assert all(1 <= node.depth <= stats.deepest for node in output.rejected)


def test_they_are_reported_only_where_that_is_asked() -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    outputs = run_all(
        toy_engine(drafter=TruthDrafter({}, 0, 0.0), node_budget=8), [Request("r", PROMPT, params)]
    )
    assert all(output.rejected == () for output in outputs)


def test_counts_survive_the_wire_and_add_up() -> None:
    one, two = SpeculationStats(), SpeculationStats(disabled_drafters=["x"])
    one.observe_step([("a",)] * 5, [("a",)], deepest=4)
    two.observe_step([("a", "b")] * 2, [("a", "b")] * 2)
    two.observe_step([], [])
    wire = one.as_wire()
    assert wire["acceptance_histogram"] == [0, 1, 0, 0, 0]
    assert wire["num_spec_tokens"] == 4
    for stats in (one, two, SpeculationStats()):
        again = SpeculationStats.from_wire(stats.as_wire())
        assert again.as_wire() == stats.as_wire()
    both = SpeculationStats()
    both.add(SpeculationStats.from_wire(one.as_wire()))
    both.add(SpeculationStats.from_wire(two.as_wire()))
    total = both.as_wire()
    assert total["acceptance_histogram"] == [1, 1, 1, 0, 0]
    assert total["num_spec_steps"] == 3
    assert total["num_draft_tokens"] == 7
    assert total["mean_acceptance_length"] == 2.0
    assert total["accepted_by_source"] == {"a": 3, "b": 2}
    assert total["disabled_drafters"] == ["x"]


def test_where_nothing_was_drafted_no_rate_is_above_zero() -> None:
    stats = SpeculationStats()
    assert (stats.acceptance_rate, stats.tokens_per_step) == (0.0, 0.0)
