"""CrossoverPlot: speed, gain and draft nodes by number of streams, a panel per kind of work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter

from specdec.evals.crossover.labels import labels
from specdec.evals.crossover.summary import ADAPTIVE, IDLE_NODES, OFF
from specdec.evals.report.style import COLOURS, line_style, new_figure, tidy

Data = Mapping[str, Any]
Row = Mapping[str, Any]
Styles = Mapping[str, Mapping[str, Any]]

_COLUMNS = 3  # panels in a row
_SEEN_APART = 0.06  # of an octave, between lines that stand at the same number of streams


def ahead(data: Data) -> Figure:
    """All kinds together: adaptive's tokens per second over each other side's, with intervals.

    Where a line falls below 1, that side is faster.
    """
    styles = _styles(data)
    figure = new_figure(_title(data, "Ahead of every other side"), data, width=8, height=5)
    axes = figure.subplots()
    others = [name for name in styles if name != ADAPTIVE]
    for index, name in enumerate(others):
        rows = [row for row in data["together"] if row["setting"] == name]
        means = [row["adaptive_over"] for row in rows]
        apart = 2 ** (_SEEN_APART * (index - (len(others) - 1) / 2))
        streams = [row["concurrency"] * apart for row in rows]
        values = [mean["value"] for mean in means]
        axes.plot(streams, values, label=labels(data)[name], **styles[name])
        for x, mean in zip(streams, means, strict=True):
            if mean["low"] is not None and mean["high"] is not None:
                color = styles[name]["color"]
                axes.plot([x, x], [mean["low"], mean["high"]], color=color, linewidth=1)
    axes.axhline(1, color="0.35", linewidth=1)
    _ratio_axis(axes)
    axes.set_ylabel("tokens/s of specdec over those of")
    axes.set_xlabel("streams")
    _streams_axis([axes], data)
    axes.legend(frameon=False)
    return figure


def gain(data: Data) -> Figure:
    """Tokens per second over those of off; where a line of ours falls below 1, drafts cost more.

    Dotted lines stand where off is first as fast as the fixed setting of their colour, a dashed
    one where adaptive control has switched off.
    """
    styles = {name: style for name, style in _styles(data).items() if name != OFF}

    def draw(axes: Axes, kind: str) -> None:
        for name, style in styles.items():
            rows = [row for row in _rows_of(data, kind, name) if row["over_off"] is not None]
            axes.plot(_streams(rows), [row["over_off"] for row in rows], **style)
        axes.axhline(1, color="0.35", linewidth=1)
        _crossings(axes, data["crossovers"][kind], styles)
        _ratio_axis(axes)

    return _grid(data, "Gain over plain decoding", "tokens/s over off", draw, styles, _crossing())


def throughput(data: Data) -> Figure:
    """Tokens/s of every side with min to max shaded; a cross is a bound that adaptive fails."""
    styles = _styles(data)
    failed = {(bound["kind"], bound["concurrency"]) for bound in data["bounds"] if bound["failed"]}

    def draw(axes: Axes, kind: str) -> None:
        for name, style in styles.items():
            rows = _rows_of(data, kind, name)
            axes.plot(_streams(rows), [row["tokens_per_second"] for row in rows], **style)
            least, most = ([row[key] for row in rows] for key in ("min", "max"))
            axes.fill_between(
                _streams(rows), least, most, color=style["color"], alpha=0.15, linewidth=0
            )
        rows = [
            row
            for row in _rows_of(data, kind, ADAPTIVE)
            if (row["kind"], row["concurrency"]) in failed
        ]
        axes.plot(_streams(rows), [row["tokens_per_second"] for row in rows], **_FAILURE)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))

    more = [Line2D([], [], label="bound failed", **_FAILURE)] if failed else []
    return _grid(data, "Throughput", "tokens/s of all streams", draw, styles, more)


def nodes(data: Data) -> Figure:
    """Draft nodes verified per request; few guesses or little room leave fixed budgets less."""
    peers = data["settings"]["peers"]
    styles = {name: s for name, s in _styles(data).items() if name != OFF and name not in peers}

    def draw(axes: Axes, kind: str) -> None:
        for name, style in styles.items():
            rows = _rows_of(data, kind, name)
            axes.plot(_streams(rows), [row["nodes_per_request"] for row in rows], **style)
        axes.axhline(IDLE_NODES, color="0.6", linewidth=0.8)
        axes.set_ylim(bottom=0)

    return _grid(data, "Draft nodes", "draft nodes per request", draw, styles, [])


FIGURES: dict[str, Callable[[Data], Figure]] = {
    "ahead": ahead,
    "throughput": throughput,
    "gain": gain,
    "nodes": nodes,
}


def _grid(
    data: Data,
    title: str,
    unit: str,
    draw: Callable[[Axes, str], None],
    styles: Styles,
    more: Sequence[Line2D],
) -> Figure:
    """A panel per kind, and one legend below for all."""
    kinds = data["settings"]["kinds"]
    columns = min(_COLUMNS, len(kinds))
    lines = math.ceil(len(kinds) / columns)
    figure = new_figure(
        _title(data, title), data, width=2.0 + 4.0 * columns, height=1.8 + 2.9 * lines
    )
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    panels = list(grid.flat)
    for axes, kind in zip(panels, kinds, strict=False):
        draw(axes, kind)
        axes.set_title(kind, fontsize="medium")
    for axes in panels[len(kinds) :]:
        axes.remove()
    for index, axes in enumerate(panels[: len(kinds)]):
        if index + columns >= len(kinds):  # nothing below it
            axes.set_xlabel("streams")
            axes.tick_params(labelbottom=True)
        if index % columns == 0:
            axes.set_ylabel(unit)
    _streams_axis(panels[: len(kinds)], data)
    names = labels(data)
    handles = [Line2D([], [], label=names[name], **style) for name, style in styles.items()]
    figure.legend(
        handles=[*handles, *more],
        loc="outside lower center",
        ncols=2 if columns == 1 else min(4, len(handles) + len(more)),
        frameon=False,
    )
    return figure


def _title(data: Data, title: str) -> str:
    return f"{title}: {data['target']['model']}, {data['target']['weights']}"


def _rows_of(data: Data, kind: str, side: str) -> list[Row]:
    rows = [row for row in data["rows"] if (row["kind"], row["setting"]) == (kind, side)]
    return sorted(rows, key=lambda row: int(row["concurrency"]))


def _streams(rows: Sequence[Row]) -> list[int]:
    return [row["concurrency"] for row in rows]


def _streams_axis(panels: Iterable[Axes], data: Data) -> None:
    ticks = sorted({row["concurrency"] for row in data["rows"]})
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.xaxis.set_minor_locator(NullLocator())
        tidy(axes)


def _ratio_axis(axes: Axes) -> None:
    """Twice as fast and half as fast are as far from 1."""
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _styles(data: Data) -> dict[str, dict[str, Any]]:
    """A line style per side; adaptive control stands out, off is grey."""
    names = list(labels(data))
    others = [name for name in names if name not in (OFF, ADAPTIVE)]
    styles = {name: line_style(index + 1) for index, name in enumerate(others)}
    styles[OFF] = {**line_style(0), "color": "0.45", "linestyle": "-"}
    styles[ADAPTIVE] = {**line_style(0), "linewidth": 2.2, "zorder": 3}
    return {name: styles[name] for name in names}


def _crossings(axes: Axes, found: Mapping[str, Any], styles: Styles) -> None:
    places = [(name, number, ":") for name, number in found["off_is_as_fast_as"].items()]
    places.append((ADAPTIVE, found.get("adaptive"), "--"))
    for index, (name, number, line) in enumerate(places):
        if number is not None:
            place = number * 2 ** (_SEEN_APART * (index - (len(places) - 1) / 2))
            axes.axvline(place, color=styles[name]["color"], linestyle=line, linewidth=1.3)


_FAILURE: dict[str, Any] = {
    "color": COLOURS[2],
    "marker": "x",
    "markersize": 9,
    "linestyle": "none",
    "zorder": 4,
}


def _crossing() -> list[Line2D]:
    return [
        Line2D([], [], color="black", linestyle=":", label="off is as fast as this colour"),
        Line2D([], [], color="black", linestyle="--", label=f"adaptive below {IDLE_NODES} nodes"),
    ]
