"""CrossoverReport: what a crossover run found, kind by kind of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specdec.decision import Reason
from specdec.evals.crossover.labels import labels
from specdec.evals.crossover.summary import ADAPTIVE, AT_LEAST, BEST_PEER, IDLE_NODES, OFF
from specdec.evals.report.report import Report
from specdec.evals.report.tables import Table

if TYPE_CHECKING:  # drawn only into a folder, and matplotlib is an extra
    from matplotlib.figure import Figure

Data = Mapping[str, Any]
ALL = "all"  # kinds together
_NUM_REASONS = 2  # shown of each row; the data has all
_NUM_UNEQUAL = 5  # shown


def crossover_report(data: Data) -> Report:
    """What `specdec bench crossover` shows and writes.

    data: of `measure`. Example: `print(crossover_report(data).text())`.
    """
    return Report(
        "crossover",
        "Crossover: many streams, with drafts and without",
        data,
        tuple(_lines(data)),
        (_sides(data), streams_table(data), *_failed(data), *_unequal(data)),
        _figures(data),
    )


def streams_table(data: Data) -> Table:
    """Who is how fast: a row per concurrency and kind, and one of all kinds together.

    data: of `measure`, or a written report. Example: `"\\n".join(streams_table(data).markdown())`.
    """
    names = labels(data)
    ratios = _shown_ratios(data)
    rows: list[tuple[object, ...]] = []
    for number in data["settings"]["concurrency"]:
        for kind in data["settings"]["kinds"]:
            own = {
                row["setting"]: row
                for row in data["rows"]
                if (row["kind"], row["concurrency"]) == (kind, number)
            }
            adaptive = own.get(ADAPTIVE, {})
            rows.append(
                (
                    *(number, kind, *(round(own[name]["tokens_per_second"]) for name in names)),
                    *(_number(adaptive.get(key), 2) for key in ratios),
                )
            )
        if len(data["settings"]["kinds"]) > 1:
            both = {row["setting"]: row for row in data["together"] if row["concurrency"] == number}
            adaptive = both.get(ADAPTIVE, {})
            rows.append(
                (
                    *(number, ALL, *(round(both[name]["tokens_per_second"]) for name in names)),
                    *(_interval(adaptive.get(key)) for key in ratios),
                )
            )
    return Table(
        "streams",
        ("streams", "kind", *names.values(), *ratios.values()),
        rows,
        f"tokens/s of all streams together; {ALL}: geometric mean over the kinds, its interval",
    )


def _shown_ratios(data: Data) -> dict[str, str]:
    """Adaptive's, with their heads, as far as there is something to hold it against."""
    names = labels(data)
    if ADAPTIVE not in names:
        return {}
    ratios = {"over_off": f"{names[ADAPTIVE]} / {names.get(OFF)}"} if OFF in names else {}
    if data["settings"]["peers"]:
        ratios["over_best_peer"] = f"{names[ADAPTIVE]} / {BEST_PEER}"
    return ratios


def _lines(data: Data) -> Iterator[str]:
    target, settings = data["target"], data["settings"]
    yield (
        f"{target['model']}, weights {target['weights']}, KV cache {target['kv']}, "
        f"{target['backend']}; drafter {settings['drafter']}"
    )
    if settings["reason"]:
        yield settings["reason"]
    how = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    yield (
        f"answers: {how}, as long as plain decoding's, up to {settings['max_tokens']} tokens, "
        f"{settings['rounds']} rounds in turn"
    )
    yield (
        f"adaptive up to {settings['node_budget']} nodes a request, "
        f"{settings['token_budget']} rows a step"
    )
    for name, who in settings["servers"].items():
        yield f"{name}: {who or 'it does not say what it is'}"
    yield "tokens/s: median of the rounds; tokens, nodes: per request and step"
    yield from _crossovers(data)
    if not data["unequal"]:
        yield "answers: ours equal token by token on all sides, concurrencies and rounds"


def _sides(data: Data) -> Table:
    names = labels(data)
    return Table(
        "sides",
        (
            *("kind", "streams", "side", "tokens/s", "min", "max", "/off", "adaptive/"),
            *("decode", "rows", "tokens", "nodes", "us", "parted", "why"),
        ),
        [
            (
                *(row["kind"], row["concurrency"], names[row["setting"]]),
                *(f"{row[name]:.0f}" for name in ("tokens_per_second", "min", "max")),
                *(_number(row[name], 2) for name in ("over_off", "adaptive_over")),
                _number(row["decode_tokens_per_second"], 0),
                _number(row["rows_per_step"], 1),
                *(_number(row[name], 2) for name in ("tokens_per_step", "nodes_per_request")),
                _number(row["decide_us"], 0),
                row["parted"],
                _reasons(row["reasons"] or {}),
            )
            for row in data["rows"]
        ],
        "/off: over off; adaptive/: adaptive over this; decode: tokens/s without prompts; "
        "parted: answers that are not plain decoding's",
    )


def _failed(data: Data) -> Iterator[Table]:
    """Bounds that are not reached; nothing where all are."""
    least = ", ".join(f"{ratio} of {name}" for name, ratio in AT_LEAST.items())
    rows = [
        (
            *(bound["kind"], bound["concurrency"]),
            *(_number(bound["reached"][name], 3) for name in AT_LEAST),
            ", ".join(bound["failed"]),
        )
        for bound in data["bounds"]
        if bound["failed"]
    ]
    if rows:
        columns = ("kind", "streams", *(f"/{name}" for name in AT_LEAST), "FAILS")
        yield Table("bounds", columns, rows, f"adaptive is to reach {least}, and here it does not")


def _crossovers(data: Data) -> Iterator[str]:
    names = labels(data)
    for kind, found in data["crossovers"].items():
        for name, number in found["off_is_as_fast_as"].items():
            yield f"{kind}: off is as fast as {name} from {number or 'no number of'} streams on"
        for name, number in found["as_fast_as_adaptive"].items():
            if number is not None:
                yield f"{kind}: {names[name]} is as fast as we are from {number} streams on"
        if found.get("adaptive") is not None:
            yield (
                f"{kind}: adaptive verifies under {IDLE_NODES} nodes per request from "
                f"{found['adaptive']} streams on"
            )


def _unequal(data: Data) -> Iterator[Table]:
    if data["unequal"]:
        names = ("kind", "concurrency", "setting", "task", "num_equal")
        rows = [[item[name] for name in names] for item in data["unequal"]]
        note = f"ANSWERS DIFFER: {len(rows)}, the first of them"
        yield Table("unequal", names, rows[:_NUM_UNEQUAL], note)


def _number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _interval(value: Mapping[str, float | None] | None) -> str | None:
    """Example: `1.52 [1.41, 1.66]`."""
    if value is None:
        return None
    if value["low"] is None or value["high"] is None:
        return f"{value['value']:.2f}"
    return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def _reasons(shares: Mapping[str, float]) -> str:
    """The most frequent ones; a fixed budget weighs nothing, which needs no saying."""
    first = [item for item in shares.items() if item[0] != Reason.FIXED.value][:_NUM_REASONS]
    return ", ".join(f"{reason} {100 * share:.0f}%" for reason, share in first)


def _figures(data: Data) -> dict[str, Callable[[], Figure]]:
    def drawn(name: str) -> Callable[[], Figure]:
        def draw() -> Figure:
            from specdec.evals.crossover import plot

            return plot.FIGURES[name](data)

        return draw

    names = ["throughput", "gain", "nodes"]
    if data["settings"]["peers"]:
        names.insert(0, "ahead")
    return {name: drawn(name) for name in names}
