"""Formats: samples from files of JSON lines, one object each, told apart by their fields.

    {"turns": ["...", "..."], "category": "...", "question_id": 81}     Spec-Bench, SPEED-Bench
    {"messages": [{"role": "user", "content": "..."}, ...]}             a chat, or turns
    {"prompt": "..."}                                                   one user's turn
    {"text": "..."}                                                     a prompt without a template
    {"prompt_ids": [1, 2], "output_ids": [3]}                           a recorded answer as tokens

Every one may have a `task` (or `category`) and an `id` (or `question_id`), and all but the first a
recorded answer as `output`; a chat whose last message is the assistant's is recorded, too. Messages
of the user in a row, without answers between them, are turns.
SPEED-Bench comes as Parquet (arXiv:2604.09557); its rows as JSON lines have `turns`, and those that
NeMo-Skills prepares have `messages`, one of the user for each turn.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

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
_DEFAULT_TASK, _TOTAL = "untold", "all"
_MAX_TOKEN_ID = 2**31 - 1
# What SPEED-Bench's file holds in place of texts that others own; a turn begins with it.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


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
        samples.append(replace(sample, place=f"{file}:{number}"))
    if not samples:
        raise UsageError(f"{file} has no samples")
    return samples


def read_all(files: Sequence[Path]) -> list[Sample]:
    """All samples of several files, in order; an id that two files have gets its file's name.

    Raises UsageError like `read_samples`, and if a file is given twice.
    """
    read: dict[Path, list[Sample]] = {}
    for file in files:
        if file in read:
            raise UsageError(f"{file} is given twice")
        read[file] = read_samples(file)
    counts = Counter(sample.sample_id for samples in read.values() for sample in samples)
    return [
        replace(sample, sample_id=f"{file}:{sample.sample_id}")
        if counts[sample.sample_id] > 1
        else sample
        for file, samples in read.items()
        for sample in samples
    ]


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    if content.startswith(b"PAR1"):
        raise UsageError(
            f"{file} is Parquet: write its rows as JSON lines, for one with pandas: "
            "read_parquet(FILE).to_json(NEW, orient='records', lines=True)"
        )
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"{file}:{number}: this is not UTF-8 text: save it as UTF-8") from None
        if text.strip():
            yield number, text


def _sample(line: str, number: int) -> Sample:
    fields = _object(line)
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
    sample = replace(sample, turn_of=_string(fields, "turn_of"), seed=_seed(fields))
    if output is None and output_ids is None:
        return sample
    if sample.output is not None:
        raise _Wrong("the answer is the last message: only one of that and output can be")
    return replace(sample, output=output, output_ids=output_ids)


def _object(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise _Wrong(f"this is not one JSON object on one line: {error.msg}") from None
    except RecursionError:
        raise _Wrong("this is nested too deep") from None
    except ValueError:  # Python reads no more than 4300 digits
        raise _Wrong("a number has too many digits") from None
    if not isinstance(fields, dict):
        raise _Wrong("a line must be a JSON object")
    if "\\u" in line:
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _Wrong("a text holds half of a character: a \\ud... escape alone") from None
    return fields


def _seed(fields: Mapping[str, Any]) -> int | None:
    seed = fields.get("seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**64):
        raise _Wrong("seed must be a number from 0 to 2**64 - 1")
    return seed


def _no_number(name: str) -> NoReturn:
    raise _Wrong(f"{name} is not JSON: write null, or leave the field out")


def _prompt(kind: str, fields: Mapping[str, Any], sample_id: str, task: str) -> Sample:
    if kind == "turns":
        turns = fields["turns"]
        if not isinstance(turns, list) or not turns or not all(_is_text(turn) for turn in turns):
            raise _Wrong("turns must be a list of texts that are not empty")
        return Sample(sample_id, task, (_user(_fetched(turns[0])),), _later(turns[1:]))
    if kind == "messages":
        messages = _messages(fields["messages"])
        if messages[-1]["role"] != "assistant":
            return _chat(sample_id, task, messages)
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


def _chat(sample_id: str, task: str, messages: tuple[Message, ...]) -> Sample:
    """A chat to be answered; where the user speaks several times unanswered, each is a turn."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages) - 1)
    rest = messages[first + 1 :]
    if any(message["role"] != "user" for message in rest):
        return Sample(sample_id, task, messages)
    _fetched(messages[first]["content"])
    return Sample(sample_id, task, messages[: first + 1], _later([m["content"] for m in rest]))


def _later(turns: Sequence[str]) -> tuple[str, ...]:
    return tuple(_fetched(turn) for turn in turns)


def _fetched(turn: str) -> str:
    if turn.startswith(_PLACEHOLDER):
        raise _Wrong(
            "SPEED-Bench's own file has no text here: fetch it with prepare_data.py of "
            "specdec_bench (NVIDIA/Model-Optimizer), or leave this line out"
        )
    return turn


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _id(fields: Mapping[str, Any], number: int) -> str:
    for name in ("id", "question_id"):
        value = fields.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
        if value is not None:
            raise _Wrong(f"{name} must be text or a whole number")
    return f"line {number}"


def _task(fields: Mapping[str, Any]) -> str:
    category = fields.get("task")
    if category is None:
        category = fields.get("category")
    if category is not None and not _is_text(category):
        raise _Wrong("task must be text")
    if category == _TOTAL:
        raise _Wrong(
            f"{_TOTAL!r} is what all tasks together are called: give the task another name"
        )
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
    if not isinstance(value, list) or not all(
        type(item) is int and 0 <= item <= _MAX_TOKEN_ID for item in value
    ):
        raise _Wrong(f"{name} must be a list of token ids")
    return tuple(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
