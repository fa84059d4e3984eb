"""Load plots: times, throughput and gain against load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.evals.load.summary import by_label, unit

if TYPE_CHECKING:  # drawn only into a folder, and matplotlib is an extra
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Data = Mapping[str, Any]


def latency(data: Data) -> Figure:
    """p99 of TTFT and of ITL, or of TPOT without it, against load; the knee has a ring."""
    from specdec.evals.report.style import new_figure

    levels = data["levels"]
    between = "itl" if any(level["p99_itl_ms"] for level in levels) else "tpot"
    figure = new_figure("p99 latency against load (ring: knee)", data, width=10, height=4.5)
    left, right = figure.subplots(1, 2)
    for axes, key in ((left, "ttft"), (right, between)):
        _against_load(axes, data, f"p99_{key}_ms")
        axes.set_ylabel(f"p99 {key.upper()}, ms")
        if any(level[f"p99_{key}_ms"] for level in levels):
            axes.set_yscale("log")
            _plain_ticks(axes.yaxis)
    _legend(left, data)
    return figure


def frontier(data: Data) -> Figure:
    """Throughput against what each answer takes; a point per load, with its number."""
    from specdec.evals.report.style import line_style, new_figure, tidy

    figure = new_figure("Throughput against latency", data)
    axes = figure.subplots()
    for number, (label, levels) in enumerate(by_label(data["levels"]).items()):
        kept = [  # 0: it all came at once
            level
            for level in levels
            if level["median_tpot_ms"] and level["output_throughput"] is not None
        ]
        times = [level["median_tpot_ms"] for level in kept]
        rates = [level["output_throughput"] for level in kept]
        axes.plot(times, rates, label=label, **line_style(number))
        _ring(axes, kept, times, rates, data["knees"][label], label="knee" if not number else None)
        for level, at, rate in zip(kept, times, rates, strict=True):
            axes.annotate(
                f"{level['load']:g}",
                (at, rate),
                xytext=(7, -11),
                textcoords="offset points",
                fontsize=8,
            )
    if any(level["median_tpot_ms"] for level in data["levels"]):
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    axes.margins(0.08, 0.12)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("median time per output token, ms")
    axes.set_ylabel("output tokens/s, all together")
    axes.set_title(f"numbers: {unit(data['levels'])}", fontsize=9)
    tidy(axes)
    axes.legend(frameon=False) if axes.get_legend_handles_labels()[1] else None
    return figure


def goodput(data: Data) -> Figure:
    """Answers that keep the goals, and all answers, per second against load."""
    from specdec.evals.report.style import line_style, new_figure

    figure = new_figure(f"Goodput: {data['settings']['goals']}", data)
    axes = figure.subplots()
    for number, (label, levels) in enumerate(by_label(data["levels"]).items()):
        loads = [level["load"] for level in levels]
        style = line_style(number)
        good = [level["request_goodput"] for level in levels]
        every = [level["request_throughput"] for level in levels]
        start = f"{label}: " if label else ""
        axes.plot(loads, good, label=f"{start}good", **style)
        axes.plot(
            loads, every, label=f"{start}all", **{**style, "markerfacecolor": "white", "alpha": 0.6}
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("answers per second")
    _load_axis(axes, data)
    axes.legend(frameon=False)
    return figure


def gain(data: Data) -> Figure:
    """Output tokens/s over those without drafts, against load, with the crossover."""
    from specdec.evals.report.style import line_style, new_figure

    figure = new_figure("Gain of drafting against load", data)
    axes = figure.subplots()
    axes.axhline(1.0, color="0.4", linewidth=1)
    numbers = {label: number for number, label in enumerate(by_label(data["levels"]))}
    for number, (label, found) in enumerate(data["gains"].items()):
        points = sorted(map(tuple, found["by_load"]))
        style = line_style(numbers[label])
        loads, ratios = zip(*points, strict=True)
        axes.plot(loads, ratios, label=label, **style)
        if found["crossover"]:
            at = found["crossover"]
            axes.axvline(at, color=style["color"], linestyle=":", linewidth=1)
            axes.annotate(
                f"pays up to {at:.3g}",
                (at, 1.0),
                xytext=(5, 6 + 12 * number),
                textcoords="offset points",
                fontsize=8,
            )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("output tokens/s over those without drafts")
    _load_axis(axes, data)
    axes.legend(frameon=False, loc="lower left")
    return figure


def _against_load(axes: Axes, data: Data, key: str) -> None:
    """A line per series, with a ring at its knee; levels without the figure are left out."""
    from specdec.evals.report.style import line_style

    for number, (label, levels) in enumerate(by_label(data["levels"]).items()):
        kept = [level for level in levels if level[key]]  # 0: it all came at once
        loads = [level["load"] for level in kept]
        values = [level[key] for level in kept]
        axes.plot(loads, values, label=label, **line_style(number))
        _ring(axes, kept, loads, values, data["knees"][label])
    _load_axis(axes, data)


def _ring(
    axes: Axes,
    levels: Sequence[Data],
    xs: Sequence[float],
    ys: Sequence[float],
    knee: float | None,
    label: str | None = None,
) -> None:
    at = [number for number, level in enumerate(levels) if level["load"] == knee]
    for number in at:
        axes.plot(
            *(xs[number], ys[number]),
            marker="o",
            markersize=15,
            markerfacecolor="none",
            markeredgecolor="0.2",
            linestyle="none",
            label=label,
        )


def _load_axis(axes: Axes, data: Data) -> None:
    from specdec.evals.report.style import tidy

    loads = sorted({level["load"] for level in data["levels"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.minorticks_off()
    axes.set_xlabel(unit(data["levels"]))
    tidy(axes)


def _plain_ticks(axis: Axis) -> None:
    """Numbers as they are said, also where a logarithmic axis spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def _legend(axes: Axes, data: Data) -> None:
    if any(data["knees"]):
        axes.legend(frameon=False, fontsize=8)
