"""CrossoverReport: what a crossover run found, kind by kind of work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specdec.decision import Reason
from specdec.evals.crossover.summary import AT_LEAST, IDLE_NODES
from specdec.evals.report.report import Report
from specdec.evals.report.tables import Table

if TYPE_CHECKING:  # drawn only into a folder, and matplotlib is an extra
    from matplotlib.figure import Figure

_NUM_REASONS = 2  # shown of each row; the data has all
_COLUMNS = "streams setting tokens/s min max decode /off /best rows tokens nodes us why"


def report_of(data: Mapping[str, Any]) -> Report:
    """A table per kind of work, the bounds, and what differed; data: of `measure`."""
    tables = [_rows(data, kind) for kind in data["settings"]["kinds"]]
    return Report(
        "crossover",
        "Crossover: from how many streams on drafts stop paying",
        data,
        tuple(_lines(data)),
        (*tables, *_bounds(data), *_unequal(data)),
        {"throughput": lambda: _drawn("throughput", data), "gain": lambda: _drawn("gain", data)},
    )


def _drawn(name: str, data: Mapping[str, Any]) -> Figure:
    from specdec.evals.crossover import plot

    draw = {"throughput": plot.throughput, "gain": plot.gain}[name]
    return draw(data)


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    target, settings = data["target"], data["settings"]
    yield (
        f"{target['model']}, weights {target['weights']}, KV cache {target['kv']}, "
        f"{target['backend']}; drafter {settings['drafter']}"
    )
    yield (
        f"answers of up to {settings['max_tokens']} tokens, {settings['rounds']} rounds; adaptive "
        f"up to {settings['node_budget']} nodes, {settings['token_budget']} rows a step"
    )
    yield (
        "tokens/s of all streams together, median of the rounds; decode: of steps without a prompt"
    )
    yield "/off, /best: over off, over the best fixed setting; tokens, nodes: per request and step"
    yield from _crossovers(data)
    if not data["unequal"]:
        yield "answers: equal token by token in all settings, concurrencies and rounds"


def _rows(data: Mapping[str, Any], kind: str) -> Table:
    return Table(
        kind,
        _COLUMNS.split(),
        [
            (
                row["concurrency"],
                row["setting"],
                *(f"{row[name]:.0f}" for name in ("tokens_per_second", "min", "max")),
                _number(row["decode_tokens_per_second"], 0),
                _number(row["over_off"], 2),
                _number(row["over_best_fixed"], 2),
                f"{row['rows_per_step']:.1f}",
                f"{row['tokens_per_step']:.2f}",
                f"{row['nodes_per_request']:.2f}",
                f"{row['decide_us']:.0f}",
                _reasons(row["reasons"]),
            )
            for row in data["rows"]
            if row["kind"] == kind
        ],
        f"{kind}:",
    )


def _bounds(data: Mapping[str, Any]) -> Iterator[Table]:
    """Nothing where adaptive control was not measured."""
    least = ", ".join(f"{ratio} of {name}" for name, ratio in AT_LEAST.items())
    rows = [
        (
            bound["kind"],
            bound["concurrency"],
            _number(bound["over_off"], 3),
            _number(bound["over_best_fixed"], 3),
            bound["best_fixed"] or "-",
            "FAILS: " + ", ".join(bound["failed"]) if bound["failed"] else "ok",
        )
        for bound in data["bounds"]
    ]
    if rows:
        columns = ("kind", "streams", "/off", "/best", "best", "bounds")
        yield Table("bounds", columns, rows, f"adaptive is to reach {least}")


def _crossovers(data: Mapping[str, Any]) -> Iterator[str]:
    for kind, found in data["crossovers"].items():
        for name, number in found["off_is_as_fast_as"].items():
            yield f"{kind}: off is as fast as {name} from {number or 'no number of'} streams on"
        if "adaptive" in found:
            yield (
                f"{kind}: adaptive verifies under {IDLE_NODES} nodes per request from "
                f"{found['adaptive'] or 'no number of'} streams on"
            )


def _unequal(data: Mapping[str, Any]) -> Iterator[Table]:
    if data["unequal"]:
        names = ("kind", "concurrency", "setting", "task", "num_equal")
        rows = [[item[name] for name in names] for item in data["unequal"]]
        yield Table("unequal", names, rows[:5], f"ANSWERS DIFFER: {len(rows)}, the first of them")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _reasons(shares: Mapping[str, float]) -> str:
    """The most frequent ones; a fixed budget weighs nothing, which needs no saying."""
    first = [item for item in shares.items() if item[0] != Reason.FIXED.value][:_NUM_REASONS]
    return ", ".join(f"{reason} {100 * share:.0f}%" for reason, share in first)
