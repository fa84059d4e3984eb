"""Markdown: a latency measurement's tables as README and docs have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.evals.latency.tables import (
    KEPT,
    every_name,
    how,
    label,
    names_of,
    ratio_to,
    tasks_of,
)
from specdec.evals.report.tables import Table

Data = Mapping[str, Any]


def markdown(data: Data) -> str:
    """Speeds by task and how many times that ours is, a table for each temperature, for docs."""
    return "\n\n".join("\n".join(_full(data, found)) for found in data["temperatures"])


def short_markdown(data: Data) -> str:
    """Speeds over all prompts and how many times that ours is, at each temperature, for README."""
    columns = ["one stream"]
    for found in data["temperatures"]:
        columns += [f"tokens/s, {how(found)}", "ours is"]
    rows = []
    for name in every_name(data):
        row = [_name(data, name)]
        for found in data["temperatures"]:
            speed = found["speeds"].get(name)
            row.append("-" if speed is None else f"{speed['all']['value']:.0f}")
            row.append(_times_and_bounds(ratio_to(data, found, name)))
        rows.append(row)
    return "\n".join(Table("readme", columns, rows).markdown())


def _full(data: Data, found: Data) -> Iterator[str]:
    tasks = tasks_of(data)
    rows = []
    for name in names_of(data, found):
        speed, ratio = found["speeds"][name], ratio_to(data, found, name)
        row = [_name(data, name)]
        for task in tasks:
            times = "" if ratio is None else f" ({_times(ratio['tasks'][task])})"
            row.append(f"{speed['tasks'][task]:.0f}{times}")
        rows.append((*row, f"{speed['all']['value']:.0f}", _times_and_bounds(ratio)))
    columns = (f"tokens/s, {how(found)}", *tasks, "all", "ours is")
    return Table("docs", columns, rows).markdown()


def _name(data: Data, name: str) -> str:
    return f"**{name}**" if name == data["settings"]["ours"] else label(data, name)


def _times_and_bounds(ratio: Data | None) -> str:
    if ratio is None:
        return ""
    value, low, high = (ratio["all"][bound] for bound in KEPT)
    bounds = "" if low is None else f" [{_digits(low)}, {_digits(high)}]"
    return f"{_times(value)}{bounds}"


def _times(value: float) -> str:
    return f"{_digits(value)}x"


def _digits(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
