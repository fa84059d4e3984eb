"""EngineCounters: what an engine counts is what its requests and their outputs add up to."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest
import torch

from specdec.counters import Histogram
from specdec.engine import Engine
from specdec.metrics import SpeculationStats
from specdec.params import SamplingParams
from specdec.request import Request, RequestOutput
from tests.toy import ALPHABET, TruthDrafter, run_all, toy_engine

VOCAB = len(ALPHABET)


def request(request_id: str, num_prompt: int = 5, **settings: Any) -> Request:
    prompt = tuple((7 * k + num_prompt) % VOCAB for k in range(num_prompt))
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 3, **settings})
    return Request(request_id, prompt, params)


def drafting_engine(**settings: Any) -> Engine:
    """An engine whose drafter often knows what comes, for the requests of `request`."""
    truth = {}
    for num_prompt in (5, 40):
        plain = request("plain", num_prompt)
        run_all(toy_engine(), [plain])
        truth[f"r{num_prompt}"] = plain.output_ids
    return toy_engine(drafter=TruthDrafter(truth, 2, 0.8), node_budget=12, **settings)


def summed(outputs: list[RequestOutput]) -> SpeculationStats:
    total = SpeculationStats()
    for output in outputs:
        if output.stats is not None:
            total.add(output.stats)
    return total


def test_a_value_on_a_bound_lies_below_it_and_one_may_count_often() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 1.0, 1.1):
        histogram.observe(value)
    histogram.observe(0.5, 3)
    assert histogram.as_json()["counts"] == [1, 4, 1]
    assert histogram.as_json()["sum"] == pytest.approx(0.1 + 1.0 + 1.1 + 1.5)


def test_totals_are_those_of_the_requests_aborted_ones_too() -> None:
    engine = drafting_engine()
    requests = [request("r5"), request("r40", 40), request("gone", 5)]
    for item in requests:
        engine.add(item)
    outputs = engine.step() + engine.step()
    so_far = engine.count()["totals"]["num_decode_steps"]
    assert so_far == sum(item.stats.num_steps for item in requests) > 0
    engine.abort("gone")
    while engine.has_work:
        outputs += engine.step()
    totals, stats = engine.count()["totals"], summed(outputs)
    assert stats.num_accepted > 5, "some guesses came true"
    assert totals["finished"] == {"length": 2, "abort": 1}
    assert totals["num_output"] == sum(len(output.tokens) for output in outputs)
    assert totals["num_prompt"] == sum(len(item.prompt_ids) for item in requests)
    assert totals["num_decode_steps"] == stats.num_steps
    assert totals["num_draft_tokens"] == stats.num_draft_tokens == sum(totals["drafted_at"])
    assert totals["num_accepted"] == stats.num_accepted == sum(totals["accepted_at"])
    assert totals["drafted_by"] == stats.drafted_by_source
    assert totals["accepted_by"] == stats.accepted_by_source
    assert totals["num_rows"] == (
        totals["num_prefill"] + totals["num_decode_steps"] + totals["num_draft_tokens"]
    )
    assert sum(totals["reasons"].values()) == totals["num_steps"] == sum(totals["step_s"]["counts"])
    assert sum(totals["queue_s"]["counts"]) == len(requests)


def test_tokens_per_step_are_one_and_the_acceptance_at_each_position() -> None:
    engine = drafting_engine()
    requests = [request("r5"), request("r40", 40)]
    for item in requests:
        engine.add(item)
    accepted_lengths: list[int] = []  # of steps with draft nodes
    while engine.has_work:
        before = [(item.stats.num_draft_tokens, item.stats.num_accepted) for item in requests]
        engine.step()
        for item, (num_drafted, num_accepted) in zip(requests, before, strict=True):
            if item.stats.num_draft_tokens > num_drafted:
                accepted_lengths.append(item.stats.num_accepted - num_accepted)
    totals = engine.count()["totals"]
    assert totals["num_drafts"] == len(accepted_lengths) < totals["num_decode_steps"]
    shares = [count / totals["num_drafts"] for count in totals["accepted_at"]]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == max(accepted_lengths)
    assert 1 + sum(shares) == pytest.approx(1 + statistics.mean(accepted_lengths))


def test_what_an_end_cut_off_counts_as_not_accepted() -> None:
    plain = request("plain")
    run_all(toy_engine(), [plain])
    num_cut = 0
    for token_id in set(plain.output_ids):
        engine = drafting_engine()
        outputs = run_all(engine, [request("r5", stop_token_ids=frozenset([token_id]))])
        totals, stats = engine.count()["totals"], summed(outputs)
        assert totals["num_accepted"] == sum(totals["accepted_at"]) == stats.num_accepted
        num_cut += totals["num_output"] < totals["num_decode_steps"] + totals["num_accepted"]
    assert num_cut > 0, "an answer ended before its step's bonus token"


def test_a_prompt_found_cached_counts_as_hits_once() -> None:
    engine = toy_engine()
    run_all(engine, [request("first", 40)])
    assert engine.count()["totals"]["num_prefix_hit"] == 0
    run_all(engine, [request("second", 40)])
    totals = engine.count()["totals"]
    assert (totals["num_prompt"], totals["num_prefix_hit"]) == (80, 32)
    assert totals["num_prefill"] == 39 + 39 - 32


def test_preemptions_and_blocks_are_told() -> None:
    engine = toy_engine(num_blocks=5, prefix_cache=False)
    num_spare = engine.pool.num_blocks - 5
    requests = [request("a", 20, max_tokens=40), request("b", 20, max_tokens=40)]
    for item in requests:
        engine.add(item)
    assert engine.count()["now"]["num_waiting"] == 2
    engine.step()
    now = engine.count()["now"]
    assert now["num_running"] == 2
    assert now["num_held_blocks"] - num_spare == sum(len(item.block_ids) for item in requests)
    while engine.has_work:
        engine.step()
    totals = engine.count()["totals"]
    assert totals["num_preemptions"] > 0
    assert totals["num_prompt"] == 40, "a prompt that is computed again counts once"
    assert sum(totals["queue_s"]["counts"]) == 2, "waiting after a preemption is no queueing"


def test_logits_that_are_not_finite_count_as_corrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    forward = engine.runner.forward
    monkeypatch.setattr(
        engine.runner,
        "forward",
        lambda batch: dataclasses.replace(
            output := forward(batch), logits=output.logits * torch.nan
        ),
    )
    run_all(engine, [request("broken")])
    totals = engine.count()["totals"]
    assert (totals["num_corrupted"], totals["finished"]) == (1, {"error": 1})
    assert totals["num_output"] == 0


def test_what_was_a_test_is_forgotten() -> None:
    engine = toy_engine()
    run_all(engine, [request("test", 40)])
    instance = engine.count()["instance"]
    engine.forget_counts()
    counted = engine.count()
    assert counted["totals"]["reasons"] == {}
    assert counted["totals"]["num_steps"] == counted["totals"]["num_output"] == 0
    assert counted["instance"] != instance
    run_all(engine, [request("served", max_tokens=3)])
    assert engine.count()["totals"]["reasons"] == {"fixed": 3}
