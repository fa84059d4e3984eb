"""Asked: a sample's prompt, and as many tokens as its natural answer has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.evals.data.sample import Sample
from specdec.evals.latency.contender import Question
from specdec.evals.report.progress import Advance
from specdec.generation import generate
from specdec.params import SamplingParams

WARM_TOKENS = 32


@dataclass(frozen=True)
class Asked:
    """Everybody answers with as many tokens as plain decoding does before its end token: past it a
    model repeats itself, which drafters guess too well."""

    sample: Sample
    question: Question


def first_questions(
    samples: Sequence[Sample], temperatures: Sequence[float], engine: Engine
) -> list[Asked]:
    """Every sample at every temperature, the temperatures of a sample one after the other.

    Their answers have one token as yet. Raises UsageError for a sample that does not fit.
    """
    found = []
    for sample in samples:
        ids = tuple(sample.encode(engine.tokenizer))
        if not 0 < len(ids) < engine.max_model_len:
            raise UsageError(
                f"sample {sample.sample_id!r} has {len(ids)} tokens; "
                f"the context holds {engine.max_model_len}, one of them for the answer"
            )
        for temperature in temperatures:
            found.append(Asked(sample, Question(ids, 1, temperature, 0, sample.messages)))
    return found


def natural_lengths(
    asked: Sequence[Asked], engine: Engine, max_tokens: int, advance: Advance
) -> list[int]:
    """How many tokens the engine answers with, at most `max_tokens`; at least one."""
    lengths = []
    for one in asked:
        question = one.question
        advance(f"length of {one.sample.sample_id} at temperature {question.temperature:g}")
        params = SamplingParams(
            max_tokens=max_tokens, temperature=question.temperature, seed=question.seed
        )
        lengths.append(max(1, len(generate(engine, question.prompt_ids, params).tokens)))
    return lengths


def of_lengths(asked: Sequence[Asked], lengths: Sequence[int]) -> list[Asked]:
    """The same with answers of so many tokens."""
    return [
        replace(one, question=replace(one.question, num_tokens=length))
        for one, length in zip(asked, lengths, strict=True)
    ]


def warm_up(asked: Sequence[Asked]) -> list[Question]:
    """The longest prompt at each temperature, with a short answer: maps memory and fills caches."""
    found: dict[float, Question] = {}
    for one in asked:
        question = one.question
        longest = found.get(question.temperature)
        if longest is None or len(question.prompt_ids) > len(longest.prompt_ids):
            found[question.temperature] = question
    return [replace(q, num_tokens=min(q.num_tokens, WARM_TOKENS)) for q in found.values()]
