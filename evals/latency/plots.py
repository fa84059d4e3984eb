"""LatencyPlots: steps against the floor, a step's parts, times per token, speeds by contender."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.evals.latency.report import SHOWN_PARTS, short
from specdec.evals.latency.side import PLAIN
from specdec.evals.report.spread import PERCENTS
from specdec.evals.report.style import bar_style, line_style, new_figure, tidy

Data = Mapping[str, Any]
MAX_COLUMNS = 2


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
    by_name = {name: medians for name, medians in data["breakdown"].items() if medians}
    height = 2.4 + 0.6 * len(by_name)
    figure = new_figure("Where a decode step's time goes", data, width=11, height=height)
    whole, small = figure.subplots(1, 2, sharey=True)
    _stack(whole, by_name, SHOWN_PARTS)
    whole.set_xlabel("ms, whole step and its delivery")
    _stack(small, by_name, [part for part in SHOWN_PARTS if part != "forward"])
    small.set_xlabel("ms without the forward")
    whole.set_yticks(range(len(by_name)), list(map(short, by_name)))
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


def plot_times(data: Data) -> Figure:
    """Percentiles of the time to the first token, between arrivals and per token, by contender."""
    by_name = data["contenders"]
    figure = new_figure(
        "Times of one stream, all prompts", data, width=11, height=2.2 + 0.55 * len(by_name)
    )
    kinds = {
        "ttft_ms": "to the first token",
        "step_ms": "between arrivals",
        "token_ms": "per token",
    }
    places = np.arange(len(by_name))
    for axes, (kind, label) in zip(figure.subplots(1, 3, sharey=True), kinds.items(), strict=True):
        for index, percent in enumerate(PERCENTS):
            known = [
                (place, times[kind][f"p{percent}"])
                for place, times in zip(places, by_name.values(), strict=True)
                if times[kind] is not None
            ]
            at = [place + 0.27 * (index - 1) for place, _ in known]
            ms = [value for _, value in known]
            axes.barh(at, ms, 0.25, label=f"p{percent}", **bar_style(index))
        axes.set_xlabel(f"ms {label}")
        tidy(axes)
    first = figure.axes[0]
    first.set_yticks(places, list(map(short, by_name)))
    first.invert_yaxis()
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PERCENTS), frameon=False)
    return figure


def plot_speed(data: Data) -> Figure:
    """Tokens per second end to end by prompt and contender, and how often plain decoding's."""
    prompts = data["prompts"]
    num_columns = min(MAX_COLUMNS, len(prompts))
    num_lines = -(-len(prompts) // num_columns)
    height = 1.2 + num_lines * (0.8 + 0.32 * len(data["contenders"]))
    figure = new_figure("Tokens per second, end to end", data, width=11, height=height)
    panels = figure.subplots(num_lines, num_columns, squeeze=False, sharey=True).flat
    for axes, (prompt, summary) in zip(panels, prompts.items(), strict=False):
        _speeds(axes, summary)
        axes.set_title(prompt, fontsize=10)
    for axes in list(figure.axes)[len(prompts) :]:
        axes.set_visible(False)
    for axes in figure.axes[: len(prompts)][-num_columns:]:
        axes.set_xlabel("tokens/s (whiskers: slowest and fastest round)")
    return figure


def _speeds(axes: Axes, summary: Mapping[str, Any]) -> None:
    by_name = summary["contenders"]
    for place, (name, row) in enumerate(by_name.items()):
        speed = row["tokens_per_second"]
        around = [[max(0.0, speed - row["min"])], [max(0.0, row["max"] - speed)]]
        style = bar_style(1 if name != short(name) else 5)  # ours, others'
        axes.barh(place, speed, 0.7, xerr=around, ecolor="0.3", capsize=2, **style)
        ratio = over_plain(summary["ratios"], name)  # of rounds, as the table has it
        text = f"  {speed:g}" if ratio is None else f"  {speed:g}  ({ratio:.2f}x)"
        axes.text(max(speed, row["max"]), place, text, va="center", fontsize=8)
    axes.set_xlim(right=1.3 * max(row["max"] for row in by_name.values()))
    axes.set_yticks(range(len(by_name)), list(map(short, by_name)), fontsize=8)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    tidy(axes)


def over_plain(ratios: Mapping[str, float], name: str) -> float | None:
    """A contender's speed over plain decoding's, whichever way the ratio was taken."""
    if (own := ratios.get(f"{name} / {PLAIN.name}")) is not None:
        return own
    other = ratios.get(f"{PLAIN.name} / {name}")
    return 1 / other if other else None


FIGURES: dict[str, Callable[[Data], Figure]] = {
    "steps": plot_steps,
    "breakdown": plot_breakdown,
    "times": plot_times,
    "speed": plot_speed,
}
