"""Workload: the requests of one kind of work, which a measurement makes again and again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specdec.engine import Engine
from specdec.errors import SpecdecError, UsageError
from specdec.evals.data.questions import code_edits
from specdec.evals.data.sample import Sample
from specdec.evals.latency.contender import Question
from specdec.params import SamplingParams
from specdec.request import Request

PREDICTED, RANDOM = "predicted edit", "random"
MADE = (PREDICTED, RANDOM)  # kinds of work that are made here
NUM_MADE = 24  # tasks of each, but for those that the context does not hold
_LONGEST = 400  # tokens of their prompts: reading longer ones would be most of a run
_RANDOM_LENS = range(16, 129)


@dataclass(frozen=True)
class Task:
    """One request to be made, the same each time.

    `prediction_ids` is the answer expected, `has_end` whether an answer may end by itself.

    Example: `Task(Question(prompt_ids, num_tokens=64)).request("a")`.
    """

    question: Question
    prediction_ids: tuple[int, ...] = ()
    has_end: bool = True

    def request(self, request_id: str, *, may_end: bool = False) -> Request:
        """For an engine. The answer has all its tokens, unless it has an end and may have it."""
        asked = self.question
        params = SamplingParams(
            max_tokens=asked.num_tokens,
            temperature=asked.temperature,
            seed=asked.seed,
            ignore_eos=not (may_end and self.has_end),
        )
        return Request(request_id, asked.prompt_ids, params, prediction_ids=self.prediction_ids)


def kinds_of(samples: Sequence[Sample]) -> tuple[str, ...]:
    """The samples' tasks, in order. Raises UsageError for one that is called as those of MADE."""
    tasks = tuple(dict.fromkeys(sample.task for sample in samples))
    for kind in MADE:
        if kind in tasks:
            raise UsageError(f"the data have a task {kind!r}, which is made here: rename it")
    return tasks


def workload(
    kind: str, engine: Engine, samples: Sequence[Sample], max_tokens: int, temperature: float = 0.0
) -> tuple[Task, ...]:
    """The tasks of a kind of work, each with as many tokens to answer with as there may be.

    kind: a task of the samples, or one of MADE. Raises UsageError for a sample that leaves no room
    for an answer, or if the context is too short for what is made.

    Example: `workload("chat", engine, PROMPTS, 256)[0].question.prompt_ids`.
    """
    if kind == RANDOM:
        tasks = tuple(_random(engine, max_tokens))
    elif kind == PREDICTED:
        tasks = tuple(_predicted(engine, max_tokens, temperature))
    else:
        tasks = tuple(
            _asked(engine, sample, seed, max_tokens, temperature)
            for seed, sample in enumerate(sample for sample in samples if sample.task == kind)
        )
    if not tasks:
        raise UsageError(f"no prompt of {kind!r} fits this model's context: leave it out")
    return tasks


def answers_of(tasks: Sequence[Task], engine: Engine) -> list[tuple[int, ...]]:
    """Each task's answer as it ends by itself; all are computed together.

    Raises SpecdecError if the engine fails one.
    """
    requests = [task.request(f"length-{i}", may_end=True) for i, task in enumerate(tasks)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise SpecdecError(output.error)
    return [tuple(request.output_ids) for request in requests]


def with_lengths(tasks: Sequence[Task], answers: Sequence[Sequence[int]]) -> tuple[Task, ...]:
    """The tasks with as many tokens to answer with as these answers have.

    Everybody answers with as many: past its end token a model repeats itself, which drafters guess
    too well.
    """
    return tuple(
        replace(task, question=replace(task.question, num_tokens=len(answer)))
        for task, answer in zip(tasks, answers, strict=True)
    )


def _asked(engine: Engine, sample: Sample, seed: int, max_tokens: int, temperature: float) -> Task:
    """A sample's first turn."""
    ids = tuple(sample.encode(engine.tokenizer))
    room = engine.max_model_len - len(ids)
    if not ids or room < 1:
        raise UsageError(
            f"sample {sample.sample_id!r} has {len(ids)} tokens; "
            f"the context holds {engine.max_model_len}, one of them for the answer"
        )
    return Task(Question(ids, min(max_tokens, room), temperature, seed, sample.messages))


def _predicted(engine: Engine, max_tokens: int, temperature: float) -> Iterator[Task]:
    """Functions to be given back changed; their source is predicted, as editors do."""
    for seed, sample in enumerate(code_edits(NUM_MADE)):
        text = sample.messages[0]["content"]
        if len(sample.encode(engine.tokenizer)) > min(_LONGEST, engine.max_model_len - max_tokens):
            continue
        source = engine.tokenizer.encode(text[text.index("```") :], add_special_tokens=False)
        task = _asked(engine, sample, seed, max_tokens, temperature)
        yield replace(task, prediction_ids=tuple(source))


def _random(engine: Engine, max_tokens: int) -> Iterator[Task]:
    """Random token ids, answered at temperature 1: nothing repeats, so drafts are of no use.

    Such answers have no natural end: an end token is one like any other.
    """
    rng = random.Random(0)
    for seed in range(NUM_MADE):
        length = rng.choice(_RANDOM_LENS)
        ids = tuple(rng.randrange(engine.vocab_size) for _ in range(length))
        if length + max_tokens <= engine.max_model_len:
            yield Task(Question(ids, max_tokens, 1.0, seed), has_end=False)
