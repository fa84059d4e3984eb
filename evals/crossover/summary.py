"""CrossoverSummary: medians and ratios of closed loops, bounds of adaptive control, crossovers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.evals.crossover.closed_loop import LoopRun
from specdec.evals.report.spread import ratio_of_rounds

OFF, ADAPTIVE = "off", "adaptive"
AT_LEAST = {"off": 0.95, "best fixed": 0.92}  # of adaptive's tokens per second over these
IDLE_NODES = 0.5  # draft nodes per request below which adaptive control counts as switched off


@dataclass(frozen=True, order=True)
class Cell:
    """One kind of work at one concurrency."""

    kind: str
    concurrency: int


Runs = Mapping[Cell, Mapping[str, Sequence[LoopRun]]]  # by cell and setting, one per round


def summary(runs: Runs) -> dict[str, Any]:
    """Rows per cell and setting, adaptive control's bounds per cell, crossovers per kind."""
    rows = [row for cell, by_setting in runs.items() for row in cell_rows(cell, by_setting)]
    return {"rows": rows, "bounds": bounds(rows), "crossovers": crossovers(rows)}


def cell_rows(cell: Cell, by_setting: Mapping[str, Sequence[LoopRun]]) -> list[dict[str, Any]]:
    """Medians over rounds for each setting; a ratio is the median of each round's ratio.

    "best_fixed" is the setting with the highest median among those that are not adaptive.
    """
    speeds = {
        name: [run.tokens_per_second for run in rounds] for name, rounds in by_setting.items()
    }
    decode = {name: _decode_speeds(rounds) for name, rounds in by_setting.items()}
    fixed = [name for name in speeds if name != ADAPTIVE]
    best = max(fixed, key=lambda name: statistics.median(speeds[name]), default=None)

    def mean(rounds: Sequence[LoopRun], name: str) -> float:
        values: list[float] = [getattr(run, name) for run in rounds]
        return round(statistics.mean(values), 3)

    return [
        {
            "kind": cell.kind,
            "concurrency": cell.concurrency,
            "setting": name,
            "tokens_per_second": round(statistics.median(speeds[name]), 1),
            "min": round(min(speeds[name]), 1),
            "max": round(max(speeds[name]), 1),
            "rounds": [round(speed, 2) for speed in speeds[name]],
            "decode_tokens_per_second": (
                round(statistics.median(decode[name]), 1) if decode[name] else None
            ),
            "over_off": _ratio(speeds, name, OFF),
            "decode_over_off": _ratio(decode, name, OFF),
            "best_fixed": best,
            "over_best_fixed": _ratio(speeds, name, best),
            "decode_over_best_fixed": _ratio(decode, name, best),
            "rows_per_step": mean(rounds, "rows_per_step"),
            "tokens_per_step": mean(rounds, "tokens_per_step"),
            "nodes_per_request": mean(rounds, "nodes_per_request"),
            "decide_us": round(1e6 * statistics.mean(run.decide_s for run in rounds), 1),
            "num_steps": sum(len(run.steps) for run in rounds),
            "reasons": _shares(rounds),
        }
        for name, rounds in by_setting.items()
    ]


def _decode_speeds(rounds: Sequence[LoopRun]) -> list[float]:
    """Of each round, or nothing if one had no step without a prefill chunk."""
    speeds = [run.decode_tokens_per_second for run in rounds]
    known = [speed for speed in speeds if speed is not None]
    return known if len(known) == len(speeds) else []


def _ratio(speeds: Mapping[str, Sequence[float]], side: str, other: str | None) -> float | None:
    """None where one of the sides was not measured."""
    if other is None or not speeds.get(other) or not speeds[side]:
        return None
    return round(ratio_of_rounds(speeds[side], speeds[other]), 3)


def _shares(rounds: Sequence[LoopRun]) -> dict[str, float]:
    """Shares of the steps by the controller's reason, the most frequent first."""
    total = sum((run.reasons for run in rounds), Counter[str]())
    return {reason: round(n / total.total(), 4) for reason, n in total.most_common()}


def bounds(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each cell what adaptive control reaches of off and of the best fixed setting.

    They hold for all steps, prompts included: which steps have no prefill chunk depends on the
    setting, so those alone do not compare equal work.
    """
    found = []
    for row in rows:
        if row["setting"] == ADAPTIVE:
            reached = {"off": row["over_off"], "best fixed": row["over_best_fixed"]}
            failed = [
                name
                for name, ratio in reached.items()
                if ratio is not None and ratio < AT_LEAST[name]
            ]
            names = ("kind", "concurrency", "over_off", "best_fixed", "over_best_fixed")
            found.append({**{name: row[name] for name in names}, "failed": failed})
    return found


def crossovers(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By kind: the least concurrency at which off is at least as fast as each fixed budget.

    "adaptive" is the least one at which adaptive control verifies fewer than IDLE_NODES nodes per
    request, "adaptive_nodes" the nodes at each concurrency. None where there is no such
    concurrency, or off was not measured.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: int(row["concurrency"])):
        name, number = row["setting"], row["concurrency"]
        own = found.setdefault(row["kind"], {"off_is_as_fast_as": {}})
        if name == ADAPTIVE:
            own.setdefault("adaptive_nodes", []).append([number, row["nodes_per_request"]])
            is_crossed = row["nodes_per_request"] < IDLE_NODES
            own["adaptive"] = own.get("adaptive") or (number if is_crossed else None)
        elif name != OFF:
            is_crossed = row["over_off"] is not None and row["over_off"] <= 1
            first = own["off_is_as_fast_as"]
            first[name] = first.get(name) or (number if is_crossed else None)
    return found
