"""Formats: samples from files of JSON lines, one object each, told apart by their fields.

    {"turns": ["...", "..."], "category": "...", "question_id": 81}     Spec-Bench, SPEED-Bench
    {"messages": [{"role": "user", "content": "..."}, ...]}             a chat
    {"prompt": "..."}                                                   one user's turn
    {"text": "..."}                                                     a prompt without a template
    {"prompt_ids": [1, 2], "output_ids": [3]}                           a recorded answer as tokens

Every one may have a `task` (or `category`) and an `id` (or `question_id`), and all but the first a
recorded answer as `output`; a chat whose last message is the assistant's is recorded, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.errors import UsageError
from specdec.evals.data.sample import Message, Sample

# Spec-Bench numbers its questions by task (arXiv:2401.07851); the first has eight categories.
_SPEC_BENCH = {
    "chat": range(81, 161),
    "translation": range(161, 241),
    "summary": range(241, 321),
    "qa": range(321, 401),
    "math": range(401, 481),
    "rag": range(481, 561),
}
_SPEC_BENCH_CATEGORIES = {
    "chat": (
        *("writing", "roleplay", "reasoning", "math"),
        *("coding", "extraction", "stem", "humanities"),
    ),
    "translation": ("translation",),
    "summary": ("summarization",),
    "qa": ("qa",),
    "math": ("math_reasoning",),
    "rag": ("rag",),
}
_PROMPTS = ("turns", "messages", "prompt", "text", "prompt_ids")
_DEFAULT_TASK = "all"


class _Wrong(Exception):
    """What is wrong with a line."""


def read_samples(file: Path) -> list[Sample]:
    """All samples of a file, in order; what has no id is called by its line.

    Raises UsageError that names the file, the line and what is wrong with it.
    """
    samples: list[Sample] = []
    lines_of: dict[str, int] = {}
    for number, line in _lines(file):
        try:
            sample = _sample(line, number)
            first = lines_of.setdefault(sample.sample_id, number)
            if first != number:
                raise _Wrong(f"the id {sample.sample_id!r} is that of line {first} too")
        except _Wrong as wrong:
            raise UsageError(f"{file}:{number}: {wrong}") from None
        samples.append(sample)
    if not samples:
        raise UsageError(f"{file} has no samples")
    return samples


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"{file}:{number}: this is not UTF-8 text") from None
        if text.strip():
            yield number, text


def _sample(line: str, number: int) -> Sample:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise _Wrong(f"this is not JSON: {reason}") from None
    if not isinstance(fields, dict):
        raise _Wrong("a line must be a JSON object")
    kinds = [name for name in _PROMPTS if fields.get(name) is not None]
    if not kinds:
        raise _Wrong(f"one of the fields {', '.join(_PROMPTS)} is needed")
    if len(kinds) > 1:
        raise _Wrong(f"only one of {' and '.join(kinds)} can be the prompt")
    sample = _prompt(kinds[0], fields, _id(fields, number), _task(fields))
    if fields.get("output") is not None and fields.get("output_ids") is not None:
        raise _Wrong("only one of output and output_ids can be the answer")
    output, output_ids = _string(fields, "output"), _token_ids(fields, "output_ids")
    if sample.later_turns and (output is not None or output_ids is not None):
        raise _Wrong("a recorded answer belongs to one turn: leave out the later ones")
    if output is None and output_ids is None:
        return sample
    return replace(sample, output=output, output_ids=output_ids)


def _prompt(kind: str, fields: Mapping[str, Any], sample_id: str, task: str) -> Sample:
    if kind == "turns":
        turns = fields["turns"]
        if not isinstance(turns, list) or not turns or not all(_is_text(turn) for turn in turns):
            raise _Wrong("turns must be a list of texts that are not empty")
        return Sample(sample_id, task, (_user(turns[0]),), tuple(turns[1:]))
    if kind == "messages":
        messages = _messages(fields["messages"])
        if messages[-1]["role"] != "assistant":
            return Sample(sample_id, task, messages)
        if len(messages) == 1:
            raise _Wrong("there is only an assistant's message")
        return Sample(sample_id, task, messages[:-1], output=messages[-1]["content"])
    if kind == "prompt_ids":
        prompt_ids = _token_ids(fields, kind)
        if not prompt_ids:
            raise _Wrong("prompt_ids is empty")
        return Sample(sample_id, task, prompt_ids=prompt_ids)
    text = _string(fields, kind)
    if not text:
        raise _Wrong(f"{kind} is empty")
    if kind == "text":
        return Sample(sample_id, task, text=text)
    return Sample(sample_id, task, (_user(text),))


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _Wrong("messages must be a list of messages, not empty")
    for message in value:
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise _Wrong("a message must have a role and a content, both text")
    return tuple(value)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _id(fields: Mapping[str, Any], number: int) -> str:
    for name in ("id", "question_id"):
        value = fields.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
        if value is not None:
            raise _Wrong(f"{name} must be text or a number")
    return f"line {number}"


def _task(fields: Mapping[str, Any]) -> str:
    category = fields.get("task", fields.get("category"))
    if category is not None and not _is_text(category):
        raise _Wrong("task must be text")
    question = fields.get("question_id")
    for task, numbers in _SPEC_BENCH.items():
        if question in numbers and category in _SPEC_BENCH_CATEGORIES[task]:
            return task
    return category or _DEFAULT_TASK


def _string(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _Wrong(f"{name} must be text")
    return value


def _token_ids(fields: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise _Wrong(f"{name} must be a list of token ids")
    return tuple(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
