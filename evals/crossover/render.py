"""CrossoverTable: a crossover report for the terminal, kind by kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.decision import Reason
from specdec.evals.crossover.summary import AT_LEAST, IDLE_NODES
from specdec.evals.report.tables import table

_NUM_REASONS = 2  # shown of each row; the report has all


def render(report: Mapping[str, Any]) -> str:
    """What was measured, a table per kind of work, the bounds, the crossovers."""
    sections = (_head, _rows, _bounds, _crossovers, _answers)
    return "\n\n".join("\n".join(section(report)) for section in sections)


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    machine, target, settings = report["machine"], report["target"], report["settings"]
    yield (
        f"{machine['processor']}, {machine['cores']} cores, {machine['capability']}; "
        f"{report['date']}"
    )
    yield (
        f"{target['model']}, weights {target['weights']}, KV cache {target['kv']}, "
        f"{target['backend']}; drafter {settings['drafter']}"
    )
    yield (
        f"answers of up to {settings['max_tokens']} tokens, {settings['rounds']} rounds; adaptive "
        f"up to {settings['node_budget']} nodes, {settings['token_budget']} rows a step"
    )


def _rows(report: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "tokens/s of all streams together, median of the rounds; decode: of steps without a prompt"
    )
    yield "/off, /best: over off, over the best fixed setting; tokens, nodes: per request and step"
    head = "streams setting tokens/s min max decode /off /best rows tokens nodes us why"
    for kind in dict.fromkeys(row["kind"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["kind"] == kind]
        yield ""
        yield f"{kind}:"
        yield from table(
            head.split(),
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
                for row in rows
            ],
        )


def _bounds(report: Mapping[str, Any]) -> Iterator[str]:
    least = ", ".join(f"{ratio} of {name}" for name, ratio in AT_LEAST.items())
    yield f"adaptive is to reach {least}"
    yield from table(
        ["kind", "streams", "/off", "/best", "best", "bounds"],
        [
            (
                bound["kind"],
                bound["concurrency"],
                _number(bound["over_off"], 3),
                _number(bound["over_best_fixed"], 3),
                bound["best_fixed"] or "-",
                "FAILS: " + ", ".join(bound["failed"]) if bound["failed"] else "ok",
            )
            for bound in report["bounds"]
        ],
    )


def _crossovers(report: Mapping[str, Any]) -> Iterator[str]:
    yield "crossover: the least number of streams at which"
    for kind, found in report["crossovers"].items():
        for name, number in found["off_is_as_fast_as"].items():
            yield f"{kind}: off is as fast as {name}: {number or 'none'}"
        if "adaptive" in found:
            yield (
                f"{kind}: adaptive verifies under {IDLE_NODES} nodes per request: "
                f"{found['adaptive'] or 'none'}"
            )


def _answers(report: Mapping[str, Any]) -> Iterator[str]:
    unequal = report["unequal"]
    if not unequal:
        yield "answers: equal token by token in all settings, concurrencies and rounds"
        return
    yield f"ANSWERS DIFFER: {len(unequal)}, the first of them"
    names = ("kind", "concurrency", "setting", "task", "num_equal")
    yield from table(names, [[item[name] for name in names] for item in unequal[:5]])


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _reasons(shares: Mapping[str, float]) -> str:
    """The most frequent ones; a fixed budget weighs nothing, which needs no saying."""
    first = [item for item in shares.items() if item[0] != Reason.FIXED.value][:_NUM_REASONS]
    return ", ".join(f"{reason} {100 * share:.0f}%" for reason, share in first)
