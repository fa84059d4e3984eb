"""Shadows of the real engine: equal to what was drafted, and counted and cached nowhere."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specdec.engine import Engine
from specdec.params import SamplingParams
from specdec.request import Request
from specdec.server.engine_client import ENGINE_COMMAND
from tests.server.conftest import RunningServer, make_folder
from tests.server.real_engine import add_weights, ask, engine_command
from tests.server.scrape import Scrape
from tests.toy import compiled_native, run_all, toy_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

LOSSY = engine_command(
    'Engine(replace(config, verification="typical"))', "from dataclasses import replace"
)


def serving(
    folder: Path, engine_command: Sequence[str] = ENGINE_COMMAND, **more: Any
) -> RunningServer:
    compiled_native()
    add_weights(make_folder(folder))
    server = RunningServer(folder, engine_command=engine_command, shadow=1.0, **more)
    server.wait_ready()
    return server


def facts(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/debug/load").json["shadow"]
    return found


def test_all_that_a_mixed_load_was_answered_is_found_again(tmp_path: Path) -> None:
    server = serving(tmp_path)
    before = Scrape(server)
    create = partial(server.client.completions.create, model="toy", max_tokens=30, n=2)
    unseeded: list[dict[str, Any]] = [
        {"logit_bias": {"65": 9, "66": 9}, "frequency_penalty": 0.3},
        {"prediction": {"type": "content", "content": "ABABABAB"}, "logprobs": 2},
    ]
    with ThreadPoolExecutor(10) as pool:  # all at once: no pause for repetitions
        seeded = pool.map(lambda index: ask(server, index)[0], range(8))
        drawn = pool.map(lambda body: create(prompt="abc" * 9, extra_body=body), unseeded)
        answers = [*seeded, *drawn]
    server.eventually(lambda: facts(server)["checked"] == 8 + 4, timeout_s=60)
    found = facts(server)
    assert (found["divergences"], found["waiting"]) == (0, 0)
    assert set(found["dropped"].values()) == {0}
    scrape = Scrape(server, before)
    figures = [answer.metrics["speculative_decoding"] for answer in answers]
    num_output = sum(answer.usage.completion_tokens for answer in answers)
    num_accepted = sum(figure["num_accepted_draft_tokens"] for figure in figures)
    num_steps = sum(figure["num_spec_steps"] for figure in figures)
    assert scrape.value("vllm:generation_tokens_total") == num_output
    assert scrape.value("specdec:shadow_tokens_total") >= num_output
    assert scrape.value("specdec:decode_steps_total") == num_steps
    assert num_output - num_steps <= num_accepted  # less what stops cut
    assert scrape.value("vllm:spec_decode_num_accepted_tokens_total") == num_accepted > 0
    num_decisions = sum(scrape.by("reason", "specdec:decisions_total").values())
    assert num_decisions == scrape.value("specdec:step_seconds_count")
    assert scrape.value("vllm:request_queue_time_seconds_count") == 8 + 4
    assert server.end() == ""


def test_a_lossy_engine_is_found_out(tmp_path: Path) -> None:
    server = serving(tmp_path, LOSSY)
    for index in range(6):
        ask(server, 3 * index)
    server.eventually(lambda: facts(server)["checked"] == 6, timeout_s=60)
    num_found = facts(server)["divergences"]
    assert num_found > 0
    lines = server.end().splitlines()
    assert len(lines) == num_found
    pattern = (
        r"warning: shadow: (chat)?cmpl-[0-9a-f]{32} choice 0 differs without speculation at output "
        r"position \d+: TOKEN was answered, now TOKEN; temperature 1"
    )
    pattern = pattern.replace("TOKEN", r"(token \d+|the end \((stop|length)\))")
    assert all(re.fullmatch(pattern, line) for line in lines), lines


def request(request_id: str, **more: Any) -> Request:
    prompt = tuple(k % 5 for k in range(40))
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=3)
    return Request(request_id, prompt, params, cache_salt="s", **more)


@pytest.mark.parametrize("control", ["fixed", "adaptive"])
def test_the_engine_is_after_a_shadow_as_it_was_before(control: str) -> None:
    def state(engine: Engine) -> tuple[object, ...]:
        counted = engine.count()
        now = {key: counted["now"][key] for key in ("num_running", "num_waiting")}
        told = {key: value for key, value in engine.controller.explain().items() if key != "cost"}
        return counted["totals"], now, told, engine.drafter.num_steps, findable(engine)

    engine = toy_engine(drafter_name="suffix", node_budget=8, control=control)
    answered = request("r")
    run_all(engine, [answered])
    before = state(engine)
    if control == "fixed":  # what the other drafts depends on times
        assert engine.count()["totals"]["num_accepted"] > 0
    shadow = request("shadow-1", is_shadow=True)
    engine.add(shadow)
    while not shadow.is_finished:
        engine.step()
        assert state(engine) == before
    assert shadow.output_ids == answered.output_ids
    assert shadow.num_prefix_hit > 0, "it finds what its tenant may find"
    assert shadow.stats.num_draft_tokens == 0
    cut = request("shadow-2", is_shadow=True)
    engine.add(cut)
    engine.step()
    engine.abort(cut.request_id)
    engine.step()
    assert state(engine) == before
    assert not engine.has_work
    assert engine.pool.num_free == engine.pool.num_blocks
    run_all(engine, [request("t")])  # as if nothing had been


def findable(engine: Engine) -> int:
    return len(engine.pool._block_with)


def test_what_a_shadow_computes_is_not_offered_to_anybody() -> None:
    engine = toy_engine(drafter_name="suffix", node_budget=8)
    run_all(engine, [request("shadow-1", is_shadow=True)])
    assert findable(engine) == 0
    later = request("r")
    run_all(engine, [later])
    assert later.num_prefix_hit == 0
    assert findable(engine) > 0


def test_a_shadow_beside_a_request_changes_neither() -> None:
    """The server never has both at once; the engine is right all the same."""
    alone = request("r")
    run_all(toy_engine(drafter_name="suffix", node_budget=8), [alone])
    engine = toy_engine(drafter_name="suffix", node_budget=8)
    both = [request("r"), request("shadow-1", is_shadow=True)]
    run_all(engine, both)
    assert [item.output_ids for item in both] == [alone.output_ids] * 2
    assert engine.count()["totals"]["finished"] == {"length": 1}
