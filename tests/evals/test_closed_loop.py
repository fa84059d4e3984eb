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
from specdec.evals.crossover.closed_loop import ClosedLoop
from specdec.evals.crossover.loop_run import CellRun, LoopRun, LoopStep, StepTotals
from specdec.evals.crossover.workloads import (
    MADE,
    NUM_MADE,
    PREDICTED,
    RANDOM,
    Task,
    answers_of,
    kinds_of,
    with_lengths,
    workload,
)
from specdec.evals.data.sample import Sample
from specdec.evals.latency.contender import Question
from specdec.tokenizer import Tokenizer
from tests.server.conftest import make_folder
from tests.toy import check_pool, run_all, toy_engine


def tasks(*lengths: int) -> list[Task]:
    """Repetitive prompts of 9 tokens, answered with so many tokens."""
    return [
        Task(Question(tuple((1, 2, 3 + number) * 3), length))
        for number, length in enumerate(lengths)
    ]


def answer(task: Task) -> tuple[int, ...]:
    request = task.request("alone")
    run_all(toy_engine(), [request])
    return tuple(request.output_ids)


@pytest.mark.parametrize("node_budget", [0, 5])
@pytest.mark.parametrize(("concurrency", "num_requests"), [(1, 3), (3, 7), (5, 10)])
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
    expected = tuple(answer(work[number % 3]) for number in range(num_requests))
    assert run.answers == expected
    assert 0 < len(run.steps) < len(seen) - 1  # without the ramp-up
    assert run.num_tokens == sum(item.num_tokens for item in run.steps)
    assert run.seconds == pytest.approx(sum(item.seconds for item in run.steps))
    totals = StepTotals.of(run.steps)
    assert totals.nodes_per_request > 0 if node_budget else totals.nodes_per_request == 0
    assert totals.tokens_per_step > 1 if node_budget else totals.tokens_per_step == 1
    for item in run.steps:
        assert item.num_rows == item.num_prefill + item.num_requests + item.num_nodes
        assert item.seconds > 0
    assert any(item.num_prefill for item in run.steps)  # of the streams that came after
    assert totals.reasons == {"fixed": sum(item.num_requests > 0 for item in run.steps)}
    assert loop.run(work, concurrency, num_requests).answers == expected  # and over again


def test_one_stream_counts_every_step_after_its_first_answer() -> None:
    """Of 3 answers of 4 tokens one by one: the first token of each comes with its prompt."""
    run = ClosedLoop(toy_engine(control="fixed", node_budget=0)).run(tasks(4), 1, 3)
    assert [item.num_prefill > 0 for item in run.steps] == [True, *[False] * 3] * 2
    assert sum(item.num_tokens for item in run.steps) == 8


def test_a_prediction_goes_with_its_task() -> None:
    (task,) = tasks(12)
    predicting = replace(task, prediction_ids=answer(task))
    engine = toy_engine(drafter_name="prediction", node_budget=8)
    runs = [ClosedLoop(engine).run([one], 1, 2) for one in (task, predicting)]
    alone, predicted = (StepTotals.of(run.steps).tokens_per_step for run in runs)
    assert alone == 1 and predicted > 2


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
        ClosedLoop(engine).run(tasks(4), 1, 2)


def step(seconds: float, tokens: int = 8, prefill: int = 0, reason: str = "fixed") -> LoopStep:
    return LoopStep(seconds, tokens, 12 + prefill, prefill, 4, 8, reason, 2e-6)


def run_of(*steps: LoopStep, answers: tuple[tuple[int, ...] | None, ...] = ()) -> LoopRun:
    tokens = sum(item.num_tokens for item in steps)
    seconds = sum(item.seconds for item in steps)
    return LoopRun(tokens, seconds, answers, steps)


def test_decode_speed_leaves_out_steps_with_a_prompt() -> None:
    run = run_of(step(1.0), step(3.0), step(4.0, prefill=20, reason=""))
    kept = CellRun.of(run, [])
    assert kept.tokens_per_second == 3.0 and kept.decode_tokens_per_second == 4.0
    assert kept.steps is not None
    assert kept.steps.rows_per_step == pytest.approx(56 / 3)
    assert (kept.steps.tokens_per_step, kept.steps.nodes_per_request) == (2.0, 2.0)
    assert kept.steps.reasons == {"fixed": 2} and kept.steps.decide_s == pytest.approx(6e-6)
    assert CellRun.of(run_of(step(1.0, prefill=1)), []).decode_tokens_per_second is None
    assert CellRun.of(replace(run, steps=()), []).decode_tokens_per_second is None


def test_an_answer_that_parts_is_kept_with_its_task_and_place() -> None:
    """Tasks are taken over again: the third answer is the first task's."""
    expected = [(1, 2, 3), (4, 5, 6)]
    run = run_of(step(1.0), answers=((1, 2, 3), (4, 9, 6), (1, 2, 9), (4, 5, 6)))
    kept = CellRun.of(run, expected)
    assert kept.parted == ((1, 1), (0, 2))
    assert CellRun.from_json(json.loads(json.dumps(kept.as_json()))) == kept
    untold = CellRun.of(replace(run, answers=(None, (4, 9, 6))), expected)
    assert untold.parted is None
    assert CellRun.from_json(json.loads(json.dumps(untold.as_json()))) == untold


# --- workloads ---


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """What a workload needs of an engine, with one token to a byte."""
    tokenizer = Tokenizer.load(make_folder(tmp_path / "model"))
    stand_in = SimpleNamespace(tokenizer=tokenizer, vocab_size=257, max_model_len=4096)
    return cast(Engine, stand_in)


def sample(name: str, task: str, text: str = "Hi") -> Sample:
    return Sample(name, task, ({"role": "user", "content": text},))


SAMPLES = (sample("a", "chat"), sample("b", "story"), sample("c", "chat", "Why is it?"))


def test_a_kind_is_a_task_of_the_samples(engine: Engine) -> None:
    assert kinds_of(SAMPLES) == ("chat", "story")
    found = workload("chat", engine, SAMPLES, 9, 0.5)
    assert [task.question.messages for task in found] == [
        SAMPLES[0].messages,
        SAMPLES[2].messages,
    ]
    assert "Why is it?" in engine.tokenizer.decode(found[1].question.prompt_ids)
    asked = [(t.question.num_tokens, t.question.temperature, t.question.seed) for t in found]
    assert asked == [(9, 0.5, 0), (9, 0.5, 1)] and not any(t.prediction_ids for t in found)
    with pytest.raises(UsageError, match="have a task 'random', which is made here: rename"):
        kinds_of([sample("a", RANDOM)])


def test_an_answer_gets_what_room_the_context_has(engine: Engine) -> None:
    prompt = len(workload("story", engine, SAMPLES, 9)[0].question.prompt_ids)
    cast(Any, engine).max_model_len = prompt + 4
    (task,) = workload("story", engine, SAMPLES, 9)
    assert task.question.num_tokens == 4
    cast(Any, engine).max_model_len = prompt
    with pytest.raises(UsageError, match=f"sample 'b' has {prompt} tokens; the context holds"):
        workload("story", engine, SAMPLES, 9)
    for kind in MADE:
        with pytest.raises(UsageError, match=f"no prompt of '{kind}' fits this model's context"):
            workload(kind, engine, SAMPLES, 9)


def test_predicted_edits_predict_their_source(engine: Engine) -> None:
    """One token to a byte: most functions are longer than what is taken."""
    found = workload(PREDICTED, engine, (), 9)
    assert 0 < len(found) < NUM_MADE
    for task in found:
        assert len(task.question.prompt_ids) <= 400
        source = engine.tokenizer.decode(task.prediction_ids)
        assert source in engine.tokenizer.decode(task.question.prompt_ids)
        assert source.startswith("```python\n") and source.endswith("```")


def test_random_work_is_sampled_and_the_same_each_time(engine: Engine) -> None:
    found = workload(RANDOM, engine, (), 9)
    assert found == workload(RANDOM, engine, (), 9)
    assert len({task.question.prompt_ids for task in found}) == NUM_MADE
    assert [task.question.seed for task in found] == list(range(NUM_MADE))
    for task in found:
        assert task.question.temperature == 1
        assert task.request("a", may_end=True).params.ignore_eos  # it has no natural end


def test_answers_are_as_long_as_they_are_by_themselves() -> None:
    """The toy's own answer decides which token ends it."""
    (task,) = tasks(12)
    whole = answer(task)
    end = next(token for token in whole if whole.index(token) > 2)
    engine = toy_engine(model=replace(toy_engine().loaded, eos_token_ids=(end,)))
    alone, endless = answers_of([task, replace(task, has_end=False)], engine)
    assert alone == whole[: whole.index(end) + 1] and endless == whole
    (cut,) = with_lengths([task], [alone])
    assert cut == replace(task, question=replace(task.question, num_tokens=len(alone)))
    request = cut.request("exact")
    run_all(engine, [request])
    assert tuple(request.output_ids) == alone
