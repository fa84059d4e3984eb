"""Questions: what acceptance is measured on, by task."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from specdec.drafters.training.prompts import standard_functions
from specdec.errors import UsageError

# Spec-Bench numbers its questions by task.
_SPEC_BENCH = {
    "chat": range(81, 161),
    "translation": range(161, 241),
    "summary": range(241, 321),
    "qa": range(321, 401),
    "math": range(401, 481),
    "rag": range(481, 561),
}
# Modules from which no training prompt takes its functions.
_HELD_OUT = ("cmd", "fnmatch", "getopt", "glob", "netrc", "sched", "timeit", "trace", "quopri")
_EDITS = (
    "Add a docstring to this function and return the whole code.",
    "Rename the first argument of this function and return the complete function.",
    "Add type hints to this function. Return all of the code.",
    "Replace every single quote in this code by a double quote and print the result.",
)


@dataclass(frozen=True)
class Question:
    """One user's turn and its task."""

    task: str
    text: str

    @property
    def messages(self) -> list[Mapping[str, str]]:
        """The chat to answer."""
        return [{"role": "user", "content": self.text}]


def spec_bench(file: Path, per_task: int) -> list[Question]:
    """The first turns of the first questions of each task of a Spec-Bench `question.jsonl`.

    Raises UsageError if the file is not one.
    """
    found: dict[str, list[Question]] = {task: [] for task in _SPEC_BENCH}
    for fields in _lines(file):
        for task, numbers in _SPEC_BENCH.items():
            if fields["question_id"] in numbers and len(found[task]) < per_task:
                found[task].append(Question(task, str(fields["turns"][0])))
    return [question for questions in found.values() for question in questions]


def code_edits(count: int) -> list[Question]:
    """Functions of Python's standard library that are to be given back with a small change."""
    functions = islice(standard_functions(_HELD_OUT), 0, 3 * count, 3)
    return [
        Question("code edit", f"{_EDITS[index % len(_EDITS)]}\n\n```python\n{function}\n```")
        for index, function in enumerate(functions)
    ]


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                fields = json.loads(line)
                fields["question_id"], fields["turns"][0]
                yield fields
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise UsageError(f"{file} is not Spec-Bench's question.jsonl") from None
