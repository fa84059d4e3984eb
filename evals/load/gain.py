"""Gain: what drafting brings at each load, and the load from which on it brings nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


def gains(levels: Sequence[Mapping[str, Any]]) -> dict[str, dict[float, float]]:
    """By label and load, output tokens per second over those without drafts.

    Empty unless one series of the levels, and only one, drafts nothing.

    Example: `gains(levels)["node_budget=8"][4.0]` is 1.3.
    """
    off_labels = {level["label"] for level in levels if level["is_off"]}
    if len(off_labels) != 1:
        return {}
    off = {level["load"]: level["output_throughput"] for level in levels if level["is_off"]}
    found: dict[str, dict[float, float]] = {}
    for level in levels:
        is_told = level["output_throughput"] is not None
        if not level["is_off"] and off.get(level["load"]) and level["completed"] and is_told:
            ratio = level["output_throughput"] / off[level["load"]]
            found.setdefault(level["label"], {})[level["load"]] = ratio
    return found


def crossover(gain: Mapping[float, float]) -> float | None:
    """The load at which the gain falls below 1, on a straight line over the loads' logarithms.

    None if it never does; 0 if it is below 1 at every load.

    Example: `crossover({1.0: 1.5, 4.0: 0.5})` is 2.0.
    """
    loads = sorted(gain)
    if loads and max(gain.values()) < 1:
        return 0.0
    for before, after in pairwise(loads):
        if gain[before] >= 1 > gain[after]:
            share = (gain[before] - 1) / (gain[before] - gain[after])
            return math.exp(math.log(before) + share * math.log(after / before))
    return None
