"""CrossoverPlot: throughput and draft nodes over the number of streams, a column per kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter

from specdec.evals.crossover.summary import ADAPTIVE, IDLE_NODES, OFF

Row = Mapping[str, Any]
Styles = Mapping[str, Mapping[str, Any]]

_SEEN_APART = 0.06  # of an octave, between lines that stand at the same number of streams


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: above tokens/s with min to max shaded, below the draft nodes verified.

    Dotted lines stand where off is first as fast as the fixed setting of their colour, a dashed
    one where adaptive control has switched off; a cross is a bound that adaptive control fails.
    """
    rows, kinds = report["rows"], report["settings"]["kinds"]
    styles = _styles(report["settings"]["settings"])
    figure = Figure(figsize=(2.5 + 4.2 * len(kinds), 7), layout="constrained")
    grid = figure.subplots(
        2, len(kinds), squeeze=False, sharex=True, sharey="row", height_ratios=(3, 2)
    )
    for column, kind in enumerate(kinds):
        speeds, nodes = grid[:, column]
        by_setting = {
            name: sorted(
                (row for row in rows if (row["kind"], row["setting"]) == (kind, name)),
                key=lambda row: int(row["concurrency"]),
            )
            for name in styles
        }
        _speeds(speeds, by_setting, styles)
        _nodes(nodes, by_setting, styles)
        _failures(speeds, by_setting, report["bounds"])
        _crossovers((speeds, nodes), report["crossovers"][kind], styles)
        speeds.set_title(kind)
        nodes.set_xlabel("streams")
    grid[0, 0].set_ylabel("tokens/s of all streams")
    grid[1, 0].set_ylabel("draft nodes per request")
    grid[0, 0].set_yscale("log", base=2)
    grid[0, 0].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    grid[1, 0].set_ylim(bottom=0)  # of all columns, once all have drawn
    ticks = sorted({row["concurrency"] for row in rows})
    for axes in grid.flat:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.25)
    num_columns = 4 if len(kinds) > 1 else 2
    figure.legend(
        handles=_legend(styles), loc="outside lower center", ncols=num_columns, frameon=False
    )
    machine, target = report["machine"], report["target"]
    figure.suptitle(
        f"{target['model']}, {target['weights']}: {machine['processor']}, "
        f"{machine['cores']} cores, {report['date']}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour per setting; adaptive control stands out, off is grey."""
    colours = ("C0", "C1", "C2", "C4", "C5", "C6", "C8", "C9")
    fixed = [name for name in names if name not in (OFF, ADAPTIVE)]
    styles: dict[str, dict[str, Any]] = {
        name: {"color": colours[index % len(colours)]} for index, name in enumerate(fixed)
    }
    styles[OFF] = {"color": "0.35"}
    styles[ADAPTIVE] = {"color": "C3", "linewidth": 2.2, "zorder": 3}
    return {name: {"marker": "o", "markersize": 4, **styles[name]} for name in names}


def _speeds(axes: Axes, by_setting: Mapping[str, Sequence[Row]], styles: Styles) -> None:
    for name, rows in by_setting.items():
        streams = [row["concurrency"] for row in rows]
        speeds, least, most = (
            [row[key] for row in rows] for key in ("tokens_per_second", "min", "max")
        )
        axes.plot(streams, speeds, **styles[name])
        color = styles[name]["color"]
        axes.fill_between(streams, least, most, color=color, alpha=0.15, linewidth=0)


def _nodes(axes: Axes, by_setting: Mapping[str, Sequence[Row]], styles: Styles) -> None:
    """Fixed settings are there to compare with: few guesses or little room leave them less."""
    for name, rows in by_setting.items():
        if name != OFF:
            streams = [row["concurrency"] for row in rows]
            nodes = [row["nodes_per_request"] for row in rows]
            axes.plot(streams, nodes, alpha=1.0 if name == ADAPTIVE else 0.35, **styles[name])
    axes.axhline(IDLE_NODES, color="0.6", linewidth=0.8)


def _failures(
    axes: Axes, by_setting: Mapping[str, Sequence[Row]], bounds: Sequence[Mapping[str, Any]]
) -> None:
    failed = {(bound["kind"], bound["concurrency"]) for bound in bounds if bound["failed"]}
    rows = [
        row for row in by_setting.get(ADAPTIVE, ()) if (row["kind"], row["concurrency"]) in failed
    ]
    streams, speeds = ([row[key] for row in rows] for key in ("concurrency", "tokens_per_second"))
    axes.plot(streams, speeds, **_FAILURE)


def _crossovers(both: Sequence[Axes], found: Mapping[str, Any], styles: Styles) -> None:
    places = [(name, number, ":") for name, number in found["off_is_as_fast_as"].items()]
    places.append((ADAPTIVE, found.get("adaptive"), "--"))
    for index, (name, number, line) in enumerate(places):
        if number is not None:
            place = number * 2 ** (_SEEN_APART * (index - (len(places) - 1) / 2))
            for axes in both:
                axes.axvline(place, color=styles[name]["color"], linestyle=line, linewidth=1.3)


_FAILURE: dict[str, Any] = {
    "color": "black",
    "marker": "x",
    "markersize": 9,
    "linestyle": "none",
    "zorder": 4,
}


def _legend(styles: Styles) -> list[Line2D]:
    """The settings, then what the marks mean."""
    named = [Line2D([], [], label=name, **style) for name, style in styles.items()]
    return [
        *named,
        Line2D([], [], color="black", linestyle=":", label="off is as fast as this colour"),
        Line2D(*([], []), color="C3", linestyle="--", label=f"adaptive below {IDLE_NODES} nodes"),
        Line2D([], [], label="bound failed", **_FAILURE),
    ]
