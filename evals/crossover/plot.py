"""CrossoverPlot: throughput, gain and draft nodes by number of streams, a column per kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter

from specdec.evals.crossover.summary import ADAPTIVE, IDLE_NODES, OFF
from specdec.evals.report.style import COLOURS, line_style, new_figure, tidy

Row = Mapping[str, Any]
Styles = Mapping[str, Mapping[str, Any]]

_SEEN_APART = 0.06  # of an octave, between lines that stand at the same number of streams


def gain(report: Mapping[str, Any]) -> Figure:
    """Tokens per second over those of off; where a line falls below 1, drafts cost more."""
    kinds = report["settings"]["kinds"]
    styles = _styles(report["settings"]["settings"])
    figure = _figure(report, "Gain over plain decoding", height=4.5)
    grid = figure.subplots(1, len(kinds), squeeze=False, sharey=True)
    for axes, kind in zip(grid[0], kinds, strict=True):
        for name, style in styles.items():
            rows = [
                row
                for row in _rows_of(report, kind, name)
                if name != OFF and row["over_off"] is not None
            ]
            axes.plot(
                [row["concurrency"] for row in rows], [row["over_off"] for row in rows], **style
            )
        axes.axhline(1, color=styles.get(OFF, {}).get("color", "0.35"), linewidth=1)
        _crossovers([axes], report["crossovers"][kind], styles)
        axes.set_title(kind)
        axes.set_xlabel("streams")
    grid[0, 0].set_ylabel("tokens/s over off")
    _streams_axis(grid.flat, report)
    drawn = {name: style for name, style in styles.items() if name != OFF}
    _add_legend(figure, [*_named(drawn), *_crossing()], kinds)
    return figure


def throughput(report: Mapping[str, Any]) -> Figure:
    """Above tokens/s with min to max shaded, below the draft nodes verified.

    Dotted lines stand where off is first as fast as the fixed setting of their colour, a dashed
    one where adaptive control has switched off; a cross is a bound that adaptive control fails.
    """
    kinds = report["settings"]["kinds"]
    styles = _styles(report["settings"]["settings"])
    figure = _figure(report, "Throughput and draft nodes", height=7)
    grid = figure.subplots(
        2, len(kinds), squeeze=False, sharex=True, sharey="row", height_ratios=(3, 2)
    )
    for column, kind in enumerate(kinds):
        speeds, nodes = grid[:, column]
        by_setting = {name: _rows_of(report, kind, name) for name in styles}
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
    _streams_axis(grid.flat, report)
    failure = Line2D([], [], label="bound failed", **_FAILURE)
    _add_legend(figure, [*_named(styles), *_crossing(), failure], kinds)
    return figure


def _figure(report: Mapping[str, Any], title: str, *, height: float) -> Figure:
    kinds, target = report["settings"]["kinds"], report["target"]
    width = 2.5 + 4.2 * len(kinds)
    return new_figure(
        f"{title}: {target['model']}, {target['weights']}", report, width=width, height=height
    )


def _rows_of(report: Mapping[str, Any], kind: str, setting: str) -> list[Row]:
    rows = [row for row in report["rows"] if (row["kind"], row["setting"]) == (kind, setting)]
    return sorted(rows, key=lambda row: int(row["concurrency"]))


def _streams_axis(grid: Iterable[Axes], report: Mapping[str, Any]) -> None:
    ticks = sorted({row["concurrency"] for row in report["rows"]})
    for axes in grid:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.xaxis.set_minor_locator(NullLocator())
        tidy(axes)


def _add_legend(figure: Figure, handles: list[Line2D], kinds: Sequence[str]) -> None:
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=4 if len(kinds) > 1 else 2,
        frameon=False,
    )


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A line style per setting; adaptive control stands out, off is grey."""
    fixed = [name for name in names if name not in (OFF, ADAPTIVE)]
    styles = {name: line_style(index + 1) for index, name in enumerate(fixed)}
    styles[OFF] = {**line_style(0), "color": "0.45", "linestyle": "-"}
    styles[ADAPTIVE] = {**line_style(0), "linewidth": 2.2, "zorder": 3}
    return {name: styles[name] for name in names}


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
    "color": COLOURS[2],
    "marker": "x",
    "markersize": 9,
    "linestyle": "none",
    "zorder": 4,
}


def _named(styles: Styles) -> list[Line2D]:
    return [Line2D([], [], label=name, **style) for name, style in styles.items()]


def _crossing() -> list[Line2D]:
    return [
        Line2D([], [], color="black", linestyle=":", label="off is as fast as this colour"),
        Line2D([], [], color="black", linestyle="--", label=f"adaptive below {IDLE_NODES} nodes"),
    ]
