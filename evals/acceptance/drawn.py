"""Drawn: the settings of a sweep that a picture shows, and intervals for matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

Data = Mapping[str, Any]
Entry = Mapping[str, Any]  # of a report's list `settings`

MOST = 7  # settings in one picture: so many styles can be told apart
# What a sweep goes over, which of its values a picture of something else takes, and in words.
_SWEPT = {
    "temperature": (min, "temperature {:g}"),
    "node_budget": (max, "{} nodes"),
    "max_depth": (max, "depth {}"),
}


def drafting(data: Data, *, but: str = "") -> list[Entry]:
    """The settings that are no plain decoding: of a sweep, those with the most of everything.

    At the lowest temperature; `but` names what all values are taken of.

    Example: `drafting(data, but="node_budget")`.
    """
    own = [entry for entry in data["settings"] if entry["drafter"] != "none"]
    for key, (pick, _) in _SWEPT.items():
        values = [entry[key] for entry in own if entry[key] is not None]
        if values and key != but:
            own = [entry for entry in own if entry[key] == pick(values)]
    return own


def heading(title: str, data: Data, *, but: str = "") -> str:
    """A picture's title with what its settings have in common, and whether some are left out.

    Example: `heading("Speed", data)` may be "Speed: temperature 0, 8 nodes, the first 7 of 9".
    """
    parts = []
    for key, (_, words) in _SWEPT.items():
        values = {entry[key] for entry in drafting(data, but=but)}
        if len(values) == 1 and None not in values and key != but:
            parts.append(words.format(*values))
    drafters = {entry["drafter"] for entry in drafting(data, but=but)}
    number = len(drafters) if but else len(drafting(data))
    if number > MOST:
        parts.append(f"the first {MOST} of {number}")
    return f"{title}: {', '.join(parts)}" if parts else title


def errors(intervals: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """How far the bounds lie below and above the values, [2, n]; NaN, not drawn, without bounds."""
    return [
        [nan if item["low"] is None else item["value"] - item["low"] for item in intervals],
        [nan if item["high"] is None else item["high"] - item["value"] for item in intervals],
    ]


def speed_words(data: Data) -> str:
    """What a speed axis says; a replay's speeds come from a curve of step costs."""
    kind = "predicted decode speed" if data.get("step_cost") else "decode speed"
    return f"{kind} over plain (below 1: loses)"
