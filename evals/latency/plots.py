"""LatencyPlots: ratios to ours, speeds by contender, steps and their parts, times per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specdec.evals.latency.side import OURS
from specdec.evals.latency.tables import (
    SHOWN_PARTS,
    breakdowns,
    every_name,
    how,
    label,
    ratio_to,
    short,
    tasks_of,
)
from specdec.evals.report.spread import PERCENTS
from specdec.evals.report.style import COLOURS, bar_style, line_style, new_figure, tidy

Data = Mapping[str, Any]
MAX_COLUMNS = 4
_OWN = {"color": COLOURS[1], "edgecolor": "white"}
_OTHER = {"color": "0.8", "edgecolor": "0.35"}
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50)


def plot_steps(data: Data) -> Figure:
    """Median ms over rows, a line per context, shaded to p90, and the floor of the weights.

    A thin line of the same dashes is the floor with that context's keys and values.
    """
    cells, target = data["steps"], data["target"]
    figure = new_figure(f"Engine step, {target['model']}, {target['weights']}", data, height=5.5)
    axes = figure.subplots()
    for index, context in enumerate(dict.fromkeys(cell["context"] for cell in cells), start=1):
        own = [cell for cell in cells if cell["context"] == context]
        rows = [cell["rows"] for cell in own]
        p50, p90 = ([cell["step_ms"][p] for cell in own] for p in ("p50", "p90"))
        style = line_style(index)
        axes.plot(rows, p50, label=f"{context} tokens of context", **style)
        axes.fill_between(rows, p50, p90, color=style["color"], alpha=0.15, linewidth=0)
        thin = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 0.8}
        axes.axhline(own[0]["floor_with_kv_ms"], **thin)
    floor_ms = cells[0]["floor_ms"]
    axes.axhline(floor_ms, color="black", label=f"floor: reading the weights, {floor_ms:.1f} ms")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := sorted({cell["rows"] for cell in cells}), list(map(str, ticks)))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of the step (nodes of the draft tree); thin lines: floor with KV")
    axes.set_ylabel("ms (median; shaded to p90)")
    axes.legend(frameon=False)
    tidy(axes)
    return figure


def plot_breakdown(data: Data) -> Figure:
    """A stacked bar per contender of ours: the medians of a decode step's parts.

    On the right without the forward, whose size hides the others.
    """
    by_name = breakdowns(data)
    height = 2.4 + 0.6 * len(by_name)
    figure = new_figure("Where a decode step's time goes", data, width=11, height=height)
    whole, small = figure.subplots(1, 2, sharey=True)
    _stack(whole, by_name, SHOWN_PARTS)
    whole.set_xlabel("ms, whole step and its delivery")
    _stack(small, by_name, [part for part in SHOWN_PARTS if part != "forward"])
    small.set_xlabel("ms without the forward")
    whole.set_yticks(range(len(by_name)), list(by_name))
    whole.invert_yaxis()
    handles, labels = whole.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(SHOWN_PARTS), frameon=False
    )
    return figure


def _stack(axes: Axes, by_name: Mapping[str, Any], parts: Sequence[str]) -> None:
    places = np.arange(len(by_name))
    left = np.zeros(len(by_name))
    for part in parts:
        values = np.array([medians[part] for medians in by_name.values()])
        index = SHOWN_PARTS.index(part)
        style = bar_style(index)
        if index == len(SHOWN_PARTS) - 1:  # there are not as many styles
            style |= {"color": "0.8", "hatch": "||", "edgecolor": "black"}
        axes.barh(places, values, 0.6, left=left, label=part, **style)
        left += values
    for place, end in zip(places, left, strict=True):
        axes.text(end, float(place), f" {end:.2f} ms", va="center", fontsize=9)
    axes.set_xlim(right=1.25 * max(left, default=1.0))
    tidy(axes)


def plot_times(data: Data, found: Data) -> Figure:
    """Percentiles of the time to the first token, between arrivals and per token, by contender.

    found: an entry of the report's `temperatures`.
    """
    by_name = found["contenders"]
    title = f"Times of one stream, all prompts, {how(found)}"
    figure = new_figure(title, data, width=11, height=2.2 + 0.55 * len(by_name))
    kinds = {
        "ttft_ms": "to the first token",
        "step_ms": "between arrivals",
        "token_ms": "per token",
    }
    places = np.arange(len(by_name))
    for axes, (kind, words) in zip(figure.subplots(1, 3, sharey=True), kinds.items(), strict=True):
        for index, percent in enumerate(PERCENTS):
            known = [
                (place, times[kind][f"p{percent}"])
                for place, times in zip(places, by_name.values(), strict=True)
                if times[kind] is not None
            ]
            at = [place + 0.27 * (index - 1) for place, _ in known]
            ms = [value for _, value in known]
            axes.barh(at, ms, 0.25, label=f"p{percent}", **bar_style(index))
        axes.set_xlabel(f"ms {words}")
        tidy(axes)
    first = figure.axes[0]
    first.set_yticks(places, list(map(short, by_name)))
    first.invert_yaxis()
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PERCENTS), frameon=False)
    return figure


def plot_speed(data: Data) -> Figure:
    """Tokens per second end to end by task and contender, and how many times that ours is.

    A bar for each temperature, the later ones hatched; ours are dark.
    """
    panels = [*tasks_of(data), "all"]
    names = every_name(data)
    num_columns = min(MAX_COLUMNS, len(panels))
    num_lines = -(-len(panels) // num_columns)
    size = 0.14 + 0.14 * len(data["temperatures"])
    height = 1.8 + num_lines * (0.9 + size * len(names))
    figure = new_figure(
        "Tokens per second of one stream, end to end, and how many times that ours is",
        data,
        width=3.6 * num_columns,
        height=height,
    )
    grid = list(figure.subplots(num_lines, num_columns, squeeze=False, sharey=True).flat)
    for axes, panel in zip(grid, panels, strict=False):
        _speeds(axes, data, names, panel)
        axes.set_title(panel if panel != "all" else "all prompts", fontsize=10)
        axes.tick_params(axis="y", labelsize=8)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    first = grid[0]
    first.set_yticks(range(len(names)), [short(label(data, name)) for name in names])
    first.invert_yaxis()
    for axes in grid[: len(panels)][-num_columns:]:
        axes.set_xlabel("tokens/s")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _speeds(axes: Axes, data: Data, names: Sequence[str], panel: str) -> None:
    several = len(data["temperatures"])
    width = 0.76 / several
    farthest = 0.0
    for index, found in enumerate(data["temperatures"]):
        for is_own in (True, False):
            shown = [name for name in names if name in found["speeds"]]
            shown = [name for name in shown if name.startswith(OURS) == is_own]
            at = [names.index(name) + width * (index - (several - 1) / 2) for name in shown]
            speeds = [_speed(found, name, panel) for name in shown]
            style: dict[str, Any] = {"hatch": "////" if index else "", "linewidth": 0.5}
            style |= _OWN if is_own else _OTHER
            whose = "specdec" if is_own else "others"
            axes.barh(at, speeds, width, label=f"{whose}, {how(found)}", **style)
            for place, name, speed in zip(at, shown, speeds, strict=True):
                text = f" {speed:.0f}"
                if (ratio := ratio_to(data, found, name)) is not None:
                    value = ratio["all"]["value"] if panel == "all" else ratio["tasks"][panel]
                    text += f"  {value:.2f}x"
                axes.text(speed, place, text, va="center", fontsize=7)
                farthest = max(farthest, speed)
    axes.set_xlim(right=1.4 * farthest)
    tidy(axes)


def _speed(found: Data, name: str, panel: str) -> float:
    speed = found["speeds"][name]
    return float(speed["all"]["value"] if panel == "all" else speed["tasks"][panel])


def plot_ratios(data: Data) -> Figure:
    """How many times as fast ours is: a mark for each task, a bar for all prompts' interval."""
    temperatures, tasks = data["temperatures"], tasks_of(data)
    names = [n for n in every_name(data) if any(ratio_to(data, f, n) for f in temperatures)]
    ours = short(data["settings"]["ours"])
    figure = new_figure(
        f"specdec's tokens per second ({ours}) over another's, one stream, prompt by prompt",
        data,
        width=2.4 + 4.4 * len(temperatures),
        height=2.4 + 0.42 * len(names),
    )
    grid = figure.subplots(1, len(temperatures), squeeze=False, sharey=True, sharex=True).flat
    for axes, found in zip(grid, temperatures, strict=True):
        for place, name in enumerate(names):
            if (ratio := ratio_to(data, found, name)) is None:
                continue
            whole = ratio["all"]
            if whole["low"] is not None:
                axes.plot([whole["low"], whole["high"]], [place] * 2, color="0.85", linewidth=9)
            axes.plot([whole["value"]] * 2, [place - 0.3, place + 0.3], color="black", linewidth=2)
            for index, task in enumerate(tasks):
                style = {**line_style(index), "linestyle": "none"}
                at = place + 0.1 * (index - (len(tasks) - 1) / 2)
                axes.plot([ratio["tasks"][task]], [at], **style)
        axes.axvline(1, color=COLOURS[2], linestyle="--", linewidth=1)
        axes.set_title(how(found), fontsize=10)
        axes.set_xlabel("times as fast (log scale)")
        axes.set_xscale("log")
        tidy(axes)
    first = figure.axes[0]
    _plain_ticks(figure.axes)
    first.set_yticks(range(len(names)), [short(label(data, name)) for name in names])
    first.set_ylim(len(names) - 0.5, -0.5)
    marks = [
        Line2D([], [], **{**line_style(index), "linestyle": "none"}, label=task)
        for index, task in enumerate(tasks)
    ]
    marks.append(Line2D([], [], color="black", linewidth=2, label="all (geometric mean)"))
    marks.append(Line2D([], [], color="0.85", linewidth=9, label="its 95 % interval"))
    figure.legend(handles=marks, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _plain_ticks(panels: Sequence[Axes]) -> None:
    """As numbers and not as powers, at ends of the range that hold all marks."""
    low = min(0.95, *(axes.get_xlim()[0] for axes in panels))
    high = max(1.05, *(axes.get_xlim()[1] for axes in panels))
    ticks = [
        tick for tick in (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20) if low <= tick <= high
    ]
    for axes in panels:
        axes.set_xlim(low, high)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()


FIGURES: dict[str, Callable[..., Figure]] = {
    "ratios": plot_ratios,
    "steps": plot_steps,
    "breakdown": plot_breakdown,
    "times": plot_times,
    "speed": plot_speed,
}
