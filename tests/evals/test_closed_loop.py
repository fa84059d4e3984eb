"""ClosedLoop and Workload: streams are constant, all counted requests end, work is what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from specdec.engine import Engine
from specdec.errors import SpecdecError, UsageError
from specdec.evals.crossover import workloads
from specdec.evals.crossover.closed_loop import ClosedLoop, LoopRun, LoopStep
from specdec.evals.crossover.workloads import (
    CHATS,
    KINDS,
    NUM_PROMPTS,
    Task,
    WorkloadSettings,
    workload,
)
from specdec.params import SamplingParams
from specdec.request import Request
from specdec.tokenizer import Tokenizer
from tests.server.conftest import make_folder
from tests.toy import check_pool, run_all, toy_engine


def tasks(*lengths: int) -> list[Task]:
    """Repetitive prompts of 9 tokens, answered with so many tokens."""
    return [
        Task(tuple((1, 2, 3 + number) * 3), SamplingParams(max_tokens=length, ignore_eos=True))
        for number, length in enumerate(lengths)
    ]


def answer(task: Task) -> tuple[int, ...]:
    request = Request("alone", task.prompt_ids, task.params)
    run_all(toy_engine(), [request])
    return tuple(request.output_ids)


@pytest.mark.parametrize("node_budget", [0, 5])
@pytest.mark.parametrize(("concurrency", "num_requests"), [(1, 3), (3, 7), (5, 5)])
def test_streams_are_constant_and_all_counted_requests_end(
    node_budget: int, concurrency: int, num_requests: int
) -> None:
    work = tasks(4, 11, 7)
    engine = toy_engine(drafter_name="ngram", control="fixed", node_budget=node_budget)
    loop = ClosedLoop(engine)
    seen: list[int] = []
    step = engine.step

    def counted_step() -> Any:
        seen.append(len(engine.scheduler.requests))
        return step()

    with patch.object(engine, "step", counted_step):
        run = loop.run(work, concurrency, num_requests)
    assert set(seen[:-1]) == {concurrency}  # the last step only reports what was aborted
    assert not engine.has_work
    check_pool(engine)
    expected = [(number % 3, answer(work[number % 3])) for number in range(num_requests)]
    assert run.answers == expected
    assert 0 < len(run.steps) < len(seen) - 1  # without the ramp-up
    assert sum(s.num_nodes for s in run.steps) > 0 if node_budget else run.nodes_per_request == 0
    assert run.tokens_per_step > 1 if node_budget else run.tokens_per_step == 1
    for item in run.steps:
        assert item.num_rows == item.num_prefill + item.num_requests + item.num_nodes
        assert item.seconds > 0
    assert any(item.num_prefill for item in run.steps)  # of the streams that came after
    assert run.reasons["fixed"] == sum(item.num_requests > 0 for item in run.steps)
    assert loop.run(work, concurrency, num_requests).answers == expected  # and over again


def test_one_stream_counts_every_step_after_its_first_token() -> None:
    """Of 3 answers of 4 tokens one by one: the first token of each comes with its prompt."""
    run = ClosedLoop(toy_engine(control="fixed", node_budget=0)).run(tasks(4), 1, 3)
    assert [item.num_prefill > 0 for item in run.steps] == [False] * 3 + [True, *[False] * 3] * 2
    assert sum(item.num_tokens for item in run.steps) == 11


def test_a_prediction_goes_with_its_task() -> None:
    (task,) = tasks(12)
    predicting = replace(task, prediction_ids=answer(task))
    engine = toy_engine(drafter_name="prediction", node_budget=8)
    speeds = [ClosedLoop(engine).run([t], 1, 2).tokens_per_step for t in (task, predicting)]
    assert speeds[0] == 1 and speeds[1] > 2


def test_answers_that_leave_nothing_to_time_are_told() -> None:
    with pytest.raises(SpecdecError, match="allow more tokens"):
        ClosedLoop(toy_engine()).run(tasks(1), 2, 2)


def test_a_failing_request_fails_the_run() -> None:
    engine = toy_engine()
    forward = engine.runner.forward

    def broken(batch: Any) -> Any:
        target = forward(batch)
        return replace(target, logits=torch.full_like(target.logits, float("nan")))

    with (
        patch.object(engine.runner, "forward", broken),
        pytest.raises(SpecdecError, match="not finite"),
    ):
        ClosedLoop(engine).run(tasks(4), 1, 1)


def step(seconds: float, tokens: int = 8, prefill: int = 0, reason: str = "fixed") -> LoopStep:
    return LoopStep(seconds, tokens, 12 + prefill, prefill, 4, 8, reason, 2e-6)


def test_decode_speed_leaves_out_steps_with_a_prompt() -> None:
    run = LoopRun([step(1.0), step(3.0), step(4.0, prefill=20, reason="")])
    assert run.tokens_per_second == 3.0 and run.decode_tokens_per_second == 4.0
    assert run.rows_per_step == pytest.approx(56 / 3)
    assert (run.tokens_per_step, run.nodes_per_request) == (2.0, 2.0)
    assert run.reasons == {"fixed": 2} and run.decide_s == pytest.approx(2e-6)
    assert LoopRun([step(1.0, prefill=1)]).decode_tokens_per_second is None


# --- workloads ---


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """What a workload needs of an engine, with one token to a byte."""
    tokenizer = Tokenizer.load(make_folder(tmp_path / "model"))
    stand_in = SimpleNamespace(tokenizer=tokenizer, vocab_size=257, max_model_len=4096)
    return cast(Engine, stand_in)


def test_chats_are_ours_or_spec_benchs(engine: Engine, tmp_path: Path) -> None:
    found = workload("chat", engine, WorkloadSettings(max_tokens=9))
    assert len(found) == len(set(CHATS)) == len(CHATS) == NUM_PROMPTS
    assert all(task.params == SamplingParams(max_tokens=9) for task in found)
    assert CHATS[0] in engine.tokenizer.decode(found[0].prompt_ids)
    file = tmp_path / "question.jsonl"
    lines = [{"question_id": n, "turns": [f"Q{n}", "second"]} for n in (81, 241)]
    file.write_text("\n".join(map(json.dumps, lines)))
    asked = workload("chat", engine, WorkloadSettings(questions=file))
    texts = [engine.tokenizer.decode(task.prompt_ids) for task in asked]
    assert ["Q81" in texts[0], "Q241" in texts[1], len(texts)] == [True, True, 2]
    file.write_text("{}")
    with pytest.raises(UsageError, match=r"question\.jsonl:1: one of the fields"):
        workload("chat", engine, WorkloadSettings(questions=file))


def test_every_other_code_edit_predicts_its_source(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "MAX_PROMPT", 4000)
    found = workload("code-edit", engine, WorkloadSettings())
    assert len(found) == NUM_PROMPTS
    assert [bool(task.prediction_ids) for task in found] == [True, False] * (NUM_PROMPTS // 2)
    for task in found:
        source = engine.tokenizer.decode(task.prediction_ids)
        assert source in engine.tokenizer.decode(task.prompt_ids)
        assert not source or (source.startswith("```python\n") and source.endswith("```"))


def test_random_work_is_sampled_and_the_same_each_time(engine: Engine) -> None:
    found = workload("random", engine, WorkloadSettings(max_tokens=9))
    assert found == workload("random", engine, WorkloadSettings(max_tokens=9))
    assert len({task.prompt_ids for task in found}) == NUM_PROMPTS
    assert [task.params.seed for task in found] == list(range(NUM_PROMPTS))
    assert all(task.params.temperature == 1 and task.params.ignore_eos for task in found)


def test_prompts_that_are_too_long_are_left_out(engine: Engine) -> None:
    whole = workload("chat", engine, WorkloadSettings(max_tokens=96))
    lengths = sorted(len(task.prompt_ids) for task in whole)
    cast(Any, engine).max_model_len = 96 + lengths[2]
    fitting = workload("chat", engine, WorkloadSettings(max_tokens=96))
    assert sorted(len(task.prompt_ids) for task in fitting) == lengths[:3] < lengths
    cast(Any, engine).max_model_len = 96 + lengths[0] - 1
    with pytest.raises(UsageError, match="no chat prompt is as short as"):
        workload("chat", engine, WorkloadSettings(max_tokens=96))


def test_a_kind_that_there_is_not_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="unknown kind 'poem'; choose from chat, code-edit"):
        workload("poem", engine, WorkloadSettings())
    assert list(KINDS) == ["chat", "code-edit", "random"]
