"""LatencyTrend: a file of one line per measurement, and how the newest compares with it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import UsageError

KIND = ("processor", "cores", "model", "weights", "kv", "backend", "threads")


def line_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a report: when, what, on which machine, and every ratio."""
    kind = {**report["machine"], **report["target"]}
    return {
        "date": report["date"],
        "version": report["machine"]["versions"]["specdec-server"],
        **{name: kind[name] for name in KIND},
        "rounds": report["settings"]["rounds"],
        "gb_per_second": round(report["bandwidth"]["best"] / 1e9, 2),
        "ratios": _ratios(report),
    }


def _ratios(report: Mapping[str, Any]) -> dict[str, float]:
    """By name, of answers at the first temperature; they compare across days, unlike times."""
    streams, prefill, answers = report["streams"], report["prefill"], report["temperatures"][0]
    return {
        **{
            f"step / floor, {cell['rows']} rows, context {cell['context']}": cell["step_per_floor"]
            for cell in report["steps"]
        },
        f"{streams['num_streams']} streams / one": streams["ratio"],
        **{f"prefill: {name}": value for name, value in prefill["ratios"].items()},
        **{
            f"{task}: {name}": round(value, 2)
            for name, ratio in answers["ratios"].items()
            for task, value in ratio["tasks"].items()
        },
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, none if there is no file yet.

    Raises UsageError, before anything is measured, if it cannot be read or appended to.
    """
    try:
        with path.open("a+", encoding="utf-8") as file:
            file.seek(0)
            texts = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"cannot append to {path}: {reason}") from None
    return [_parse(path, number, text) for number, text in enumerate(texts, start=1)]


def _parse(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
        if isinstance(line["ratios"], dict) and all(name in line for name in KIND):
            return dict(line)
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"line {number} of {path} is not one that --append has written")


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def render(line: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> str:
    """Each ratio beside the last and the median of those measured before on the same kind."""
    alike = [old for old in before if all(old[name] == line[name] for name in KIND)]
    lines = [f"trend: {len(alike)} earlier on this kind of machine and target"]
    for name, now in line["ratios"].items():
        old = [other["ratios"][name] for other in alike if name in other["ratios"]]
        if old:
            median = statistics.median(old)
            lines.append(
                f"{name}: {now:.2f}, last {old[-1]:.2f}, median {median:.2f} "
                f"({100 * (now / median - 1):+.0f} %)"
            )
    return "\n".join(lines)
