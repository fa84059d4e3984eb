"""CrossoverSummary: medians and ratios of closed loops, bounds, crossovers."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.evals.crossover.loop_run import CellRun
from specdec.evals.report.compared import Compared
from specdec.evals.report.intervals import Interval, mean_interval, ratio_interval
from specdec.evals.report.spread import ratio_of_rounds

OFF, ADAPTIVE = "off", "adaptive"
BEST_FIXED, BEST_PEER = "best fixed", "best peer"
AT_LEAST = {OFF: 0.98, BEST_FIXED: 0.92, BEST_PEER: 1.0}  # of adaptive's tokens/s over these
RATIOS = ("over_off", "over_best_peer", "adaptive_over")
_STEP_FIGURES = (
    *("decode_tokens_per_second", "rows_per_step", "tokens_per_step", "nodes_per_request"),
    *("decide_us", "reasons"),
)
IDLE_NODES = 0.5  # draft nodes per request below which adaptive control counts as switched off


@dataclass(frozen=True, order=True)
class Cell:
    """One kind of work at one concurrency."""

    kind: str
    concurrency: int


Runs = Mapping[Cell, Mapping[str, Sequence[CellRun]]]  # by cell and side, one per round
Row = Mapping[str, Any]


def summary(
    runs: Runs, peers: Sequence[str] = (), own_servers: Sequence[str] = ()
) -> dict[str, Any]:
    """Rows per cell and side, all kinds together, adaptive control's bounds, crossovers.

    peers: the sides that are others'. own_servers: those that are servers of ours.
    """
    rows = [
        row for cell, sides in runs.items() for row in cell_rows(cell, sides, peers, own_servers)
    ]
    return {
        "rows": rows,
        "together": together(rows),
        "bounds": bounds(rows),
        "crossovers": crossovers(rows, peers, own_servers),
        "compared": [entry for cell, sides in runs.items() for entry in _compared(cell, sides)],
    }


def cell_rows(
    cell: Cell,
    sides: Mapping[str, Sequence[CellRun]],
    peers: Sequence[str] = (),
    own_servers: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Medians over rounds for each side; a ratio is the median of each round's ratio.

    "best_fixed" is our setting with the highest median that is not adaptive, "best_peer" that of
    the peers. "adaptive_over" is what adaptive reaches of this side.
    """
    speeds = {name: [run.tokens_per_second for run in runs] for name, runs in sides.items()}
    others = (ADAPTIVE, *peers, *own_servers)
    best_fixed = _fastest(speeds, [name for name in sides if name not in others])
    best_peer = _fastest(speeds, [name for name in sides if name in peers])
    return [
        {
            "kind": cell.kind,
            "concurrency": cell.concurrency,
            "setting": name,
            "tokens_per_second": round(statistics.median(speeds[name]), 3),
            "min": round(min(speeds[name]), 3),
            "max": round(max(speeds[name]), 3),
            "rounds": [round(speed, 3) for speed in speeds[name]],
            "over_off": _ratio(speeds, name, OFF),
            "adaptive_over": _ratio(speeds, ADAPTIVE, name),
            "over_best_peer": _ratio(speeds, name, best_peer),
            "best_fixed": best_fixed,
            "best_peer": best_peer,
            "parted": _parted(sides[name]),
            **_step_figures(sides[name]),
        }
        for name in sides
    ]


def _fastest(speeds: Mapping[str, Sequence[float]], names: Sequence[str]) -> str | None:
    return max(names, key=lambda name: statistics.median(speeds[name]), default=None)


def _ratio(speeds: Mapping[str, Sequence[float]], side: str, other: str | None) -> float | None:
    """None where one of the sides was not measured."""
    if side not in speeds or other is None or other not in speeds:
        return None
    return round(ratio_of_rounds(speeds[side], speeds[other]), 3)


def _parted(runs: Sequence[CellRun]) -> int | None:
    """Answers that are not plain decoding's, of all rounds; None if they are not all told."""
    if any(run.parted is None for run in runs):
        return None
    return sum(len(run.parted or ()) for run in runs)


def _step_figures(runs: Sequence[CellRun]) -> dict[str, Any]:
    """What only our own engine's steps tell; means over rounds, the speed their median."""
    steps = [run.steps for run in runs if run.steps is not None]
    if len(steps) < len(runs):
        return dict.fromkeys(_STEP_FIGURES)
    decode = [run.decode_tokens_per_second for run in runs]
    known = [speed for speed in decode if speed is not None]
    reasons = sum((Counter(one.reasons) for one in steps), Counter[str]())
    return {
        "decode_tokens_per_second": (
            round(statistics.median(known), 1) if len(known) == len(runs) else None
        ),
        "rows_per_step": round(statistics.mean(one.rows_per_step for one in steps), 3),
        "tokens_per_step": round(statistics.mean(one.tokens_per_step for one in steps), 3),
        "nodes_per_request": round(statistics.mean(one.nodes_per_request for one in steps), 3),
        "decide_us": round(
            1e6 * sum(one.decide_s for one in steps) / sum(one.num_steps for one in steps), 1
        ),
        "reasons": {
            reason: round(number / reasons.total(), 4) for reason, number in reasons.most_common()
        },
    }


def together(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By concurrency and side, over all kinds: geometric means of speeds and of ratios.

    The interval is over kinds, which are what is drawn; there is none of fewer than four.
    """
    found = []
    for number in dict.fromkeys(row["concurrency"] for row in rows):
        own = [row for row in rows if row["concurrency"] == number]
        for name in dict.fromkeys(row["setting"] for row in own):
            of = [row for row in own if row["setting"] == name]
            speed = _geometric([row["tokens_per_second"] for row in of])
            assert speed is not None  # every side has a row
            found.append(
                {
                    "concurrency": number,
                    "setting": name,
                    "tokens_per_second": round(speed.value, 3),
                    **{key: _rounded(_geometric([row[key] for row in of])) for key in RATIOS},
                }
            )
    return found


def _geometric(values: Sequence[float | None]) -> Interval | None:
    """None if one of the values is not known."""
    logs = [math.log(value) for value in values if value is not None]
    mean = mean_interval(logs) if len(logs) == len(values) else None
    if mean is None:
        return None
    bounds = (None if bound is None else math.exp(bound) for bound in (mean.low, mean.high))
    return Interval(math.exp(mean.value), *bounds)


def _rounded(interval: Interval | None) -> dict[str, float | None] | None:
    if interval is None:
        return None
    return {
        name: None if value is None else round(value, 4)
        for name, value in interval.as_json().items()
    }


def bounds(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each cell what adaptive control reaches of off, of the best fixed setting of ours, and of
    the best peer.

    They hold for all steps, prompts included: which steps have no prefill chunk depends on the
    setting, so those alone do not compare equal work.
    """
    by_side = {(row["kind"], row["concurrency"], row["setting"]): row for row in rows}
    found = []
    for row in rows:
        if row["setting"] != ADAPTIVE:
            continue
        best = {OFF: OFF, BEST_FIXED: row["best_fixed"], BEST_PEER: row["best_peer"]}
        reached = {}
        for bound, name in best.items():
            other = by_side.get((row["kind"], row["concurrency"], name))
            reached[bound] = None if other is None else other["adaptive_over"]
        failed = [
            bound
            for bound, ratio in reached.items()
            if ratio is not None and ratio < AT_LEAST[bound]
        ]
        names = ("kind", "concurrency", "best_fixed", "best_peer")
        found.append({**{name: row[name] for name in names}, "reached": reached, "failed": failed})
    return found


def crossovers(
    rows: Sequence[Row], peers: Sequence[str] = (), own_servers: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """By kind: the least concurrency at which off is at least as fast as each fixed budget, and
    from which on a peer is at least as fast as adaptive control.

    "adaptive" is the least one at which adaptive control verifies fewer than IDLE_NODES nodes per
    request, "adaptive_nodes" the nodes at each concurrency. None where there is no such
    concurrency, or what to compare with was not measured.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: int(row["concurrency"])):
        name, number = row["setting"], row["concurrency"]
        own = found.setdefault(row["kind"], {"off_is_as_fast_as": {}, "as_fast_as_adaptive": {}})
        if name == ADAPTIVE:
            own.setdefault("adaptive_nodes", []).append([number, row["nodes_per_request"]])
            is_crossed = row["nodes_per_request"] < IDLE_NODES
            own["adaptive"] = own.get("adaptive") or (number if is_crossed else None)
        elif name in peers:
            _cross(own["as_fast_as_adaptive"], name, number, row["adaptive_over"])
        elif name not in (OFF, *own_servers):
            _cross(own["off_is_as_fast_as"], name, number, row["over_off"])
    return found


def _cross(first: dict[str, int | None], name: str, number: int, ratio: float | None) -> None:
    """Keep the first concurrency at which the ratio is at most 1."""
    is_crossed = ratio is not None and ratio <= 1
    first[name] = first.get(name) or (number if is_crossed else None)


def _compared(cell: Cell, sides: Mapping[str, Sequence[CellRun]]) -> Iterator[dict[str, Any]]:
    """What two measurements can be held against each other by, round by round."""
    for name, runs in sides.items():
        parts = {
            f"round {number}": (float(run.num_tokens), run.seconds)
            for number, run in enumerate(runs, start=1)
        }
        interval = ratio_interval(*zip(*parts.values(), strict=True))
        assert interval is not None  # no run took no time
        of = f"{name}, {cell.kind}, {cell.concurrency} streams"
        yield Compared(of, "tokens/s", interval, parts=parts).as_json()
