"""Run: a report that was read back, and its figures to compare."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import UsageError
from specdec.evals.report.compared import Compared
from specdec.evals.report.intervals import Interval

Name = tuple[str, str]  # of what, and which figure

WRITERS = "eval acceptance, eval lossless, eval replay, bench latency, bench load, sim batching"
_HINT = f"give what --out DIR or --json of a measurement writes (specdec {WRITERS})"


class _Wrong(Exception):
    """What is wrong with a file."""


@dataclass(frozen=True)
class Run:
    """One report. `kind` is the command that wrote it, `entries` are by name, in its order.

    Example: `Run.read(Path("monday")).entries["suffix, chat", "tokens per step"].interval`.
    """

    file: Path
    kind: str
    data: Mapping[str, Any]
    entries: Mapping[Name, Compared]

    @classmethod
    def read(cls, path: Path) -> Run:
        """A report's JSON file, or a folder with one of them.

        Raises UsageError that names the file and says which commands write what is needed.
        """
        return _read(_only_report(path) if path.is_dir() else path)


def _only_report(folder: Path) -> Path:
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            data = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(data, dict) and "compared" in data:
            found.append(file)
    if not found:
        raise UsageError(f"{folder} has no report to compare: {_HINT}")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise UsageError(f"{folder} has several reports, name one of the files: {names}")
    return found[0]


def _read(file: Path) -> Run:
    try:
        data = json.loads(file.read_bytes(), parse_constant=_no_number)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{file} is not JSON: {_HINT}") from None
    try:
        return _run(file, data)
    except _Wrong as wrong:
        raise UsageError(f"{file}: {wrong}") from None


def _run(file: Path, data: Any) -> Run:
    if not isinstance(data, dict) or not isinstance(data.get("command"), str):
        raise _Wrong(f"this is not a report: {_HINT}")
    if not isinstance(data.get("compared"), list):
        raise _Wrong(f"this report has no figures to compare: {_HINT}")
    entries: dict[Name, Compared] = {}
    for number, fields in enumerate(data["compared"], start=1):
        try:
            entry = _entry(fields)
        except (_Wrong, AttributeError, KeyError, OverflowError, TypeError, ValueError):
            raise _Wrong(f"entry {number} of `compared` is damaged: measure it again") from None
        name = entry.of, entry.figure
        if name in entries:
            raise _Wrong(f"`compared` has {' / '.join(name)} twice: measure it again")
        entries[name] = entry
    if not entries:
        raise _Wrong("this report's list of figures to compare is empty: measure something")
    return Run(file, " ".join(data["command"].split()[1:3]), data, entries)


def _entry(fields: Any) -> Compared:
    of, figure, is_higher_better = fields["of"], fields["figure"], fields["is_higher_better"]
    if not (isinstance(of, str) and isinstance(figure, str) and type(is_higher_better) is bool):
        raise _Wrong
    low, high = (_bound(fields[name]) for name in ("low", "high"))
    return Compared(
        of,
        figure,
        Interval(_number(fields["value"]), low, high),
        is_higher_better,
        {name: (_number(top), _number(bottom)) for name, (top, bottom) in fields["parts"].items()},
    )


def _bound(value: Any) -> float | None:
    return None if value is None else _number(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _Wrong
    return float(value)


def _no_number(name: str) -> float:
    raise ValueError(name)
