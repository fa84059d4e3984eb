"""Questions of our own: functions of Python's standard library, to be given back changed."""

from __future__ import annotations

from itertools import islice

from specdec.drafters.training.prompts import standard_functions
from specdec.evals.data.sample import Sample

CODE_EDIT = "code edit"
# Modules from which no training prompt takes its functions.
_HELD_OUT = ("cmd", "fnmatch", "getopt", "glob", "netrc", "sched", "timeit", "trace", "quopri")
_EDITS = (
    "Add a docstring to this function and return the whole code.",
    "Rename the first argument of this function and return the complete function.",
    "Add type hints to this function. Return all of the code.",
    "Replace every single quote in this code by a double quote and print the result.",
)


def code_edits(count: int) -> list[Sample]:
    """Functions of Python's standard library that are to be given back with a small change."""
    functions = islice(standard_functions(_HELD_OUT), 0, 3 * count, 3)
    return [
        Sample(
            f"code edit {index}", CODE_EDIT, ({"role": "user", "content": _edit(index, function)},)
        )
        for index, function in enumerate(functions)
    ]


def _edit(index: int, function: str) -> str:
    return f"{_EDITS[index % len(_EDITS)]}\n\n```python\n{function}\n```"
