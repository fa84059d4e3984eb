"""Plots: acceptance by position and by length, tokens per step beside speed, and by drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.evals.acceptance.drawn import MOST, Data, drafting, errors, heading, speed_words
from specdec.evals.acceptance.sweep_plots import SWEEPS

if TYPE_CHECKING:  # drawn only into a folder, and matplotlib is an extra
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[[Data], "Figure"]

_MOST_POSITIONS = 16
_FEWEST_JUDGED = 10  # steps at a position whose rate is worth a point
_BAR_ROOM = 0.8  # of a group's width


def drawable(data: Data) -> dict[str, Draw]:
    """The pictures for which there is something to draw, by their files' names."""
    chosen = drafting(data)[:MOST]
    found: dict[str, Draw] = {}
    if any(entry["all"]["positions"] for entry in chosen):
        found["positions"] = by_position
    if any(entry["all"]["tokens_per_step"]["token_weighted"] for entry in chosen):
        found["tasks"] = by_task
    if any(entry["all"]["accepted_lengths"] for entry in chosen):
        found["accepted-lengths"] = accepted_lengths
    for sweep in SWEEPS:
        if sweep.is_in(data):
            found[sweep.file_name] = sweep.draw
    if any(len(entry["all"]["sources"] or ()) > 1 for entry in chosen):
        found["sources"] = by_source
    return found


def by_position(data: Data) -> Figure:
    """Share of steps that accepted a guess at each position, and of those that judged one there."""
    from matplotlib.ticker import MaxNLocator

    from specdec.evals.report.style import line_style, new_figure, tidy

    figure = new_figure(heading("Acceptance by position", data), data, width=11, height=5.5)
    is_judged = any(
        row["evaluated"] for entry in drafting(data) for row in entry["all"]["positions"] or ()
    )
    layout = "AB\nAC" if is_judged else "A\nA"
    places = figure.subplot_mosaic(layout, height_ratios=(3, 1))
    panels = dict(zip(("step", "evaluated", "number"), places.values(), strict=False))
    for index, entry in enumerate(drafting(data)[:MOST]):
        rows = (entry["all"]["positions"] or [])[:_MOST_POSITIONS]
        style = line_style(index)
        label = f"{entry['drafter']} (n = {entry['all']['steps']} steps)"
        _error_line(panels["step"], rows, "accepted_per_step", style, label)
        if not is_judged:  # a server that does not tell
            continue
        judged = [row for row in rows if (row["evaluated"] or 0) >= _FEWEST_JUDGED]
        _error_line(panels["evaluated"], judged, "accepted_per_evaluated", style, None)
        told = [(row["position"], row["evaluated"]) for row in judged]
        panels["number"].plot([x for x, _ in told], [y for _, y in told], **style)
    for axes in panels.values():
        tidy(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels["step"].set(xlabel="position", ylabel="accepted / all steps", ylim=(0, 1.02))
    if is_judged:
        panels["evaluated"].set(ylabel="accepted / steps that judged a guess there", ylim=(0, 1.02))
        panels["number"].set(xlabel="position", ylabel="n judged", yscale="log")
        panels["evaluated"].sharex(panels["number"])
        panels["evaluated"].tick_params(labelbottom=False)
    panels["step"].legend(loc="upper right", fontsize=8)
    return figure


def by_task(data: Data) -> Figure:
    """Tokens per step by task, and below them the speed that they come to."""
    from specdec.evals.report.style import bar_style, new_figure, tidy

    chosen, tasks = drafting(data)[:MOST], [*data["tasks"], "all"]
    has_speed = any(entry["all"]["decode_speedup"] for entry in chosen)
    figure = new_figure(
        heading("Tokens per step and speed by task", data),
        data,
        width=max(8.0, 1.5 * len(tasks)),
        height=7 if has_speed else 4.5,
    )
    panels = figure.subplots(2 if has_speed else 1, sharex=True, squeeze=False)[:, 0]
    width = _BAR_ROOM / max(1, len(chosen))
    for index, entry in enumerate(chosen):
        found = [*(entry["tasks"].get(task) for task in data["tasks"]), entry["all"]]
        places = [at - _BAR_ROOM / 2 + (index + 0.5) * width for at in range(len(tasks))]
        tokens = [task and task["tokens_per_step"]["token_weighted"] for task in found]
        style = bar_style(index) | {"label": entry["drafter"]}
        _error_bars(panels[0], places, tokens, width, style)
        if has_speed:
            speeds = [task and task["decode_speedup"] for task in found]
            _error_bars(panels[1], places, speeds, width, style)
    for axes in panels:
        tidy(axes)
        axes.axhline(1, color="0.2", linewidth=1)
        axes.grid(visible=False, axis="x")
    panels[0].set_ylabel("tokens per step")
    panels[-1].set_xticks(range(len(tasks)), tasks)
    if has_speed:
        panels[1].set_ylabel(speed_words(data).replace(" (", "\n("))
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(4, max(1, len(chosen))),
        fontsize=8,
    )
    return figure


def accepted_lengths(data: Data) -> Figure:
    """Share of steps by accepted length, a panel for each setting."""
    from matplotlib.ticker import MaxNLocator

    from specdec.evals.report.style import bar_style, new_figure, tidy

    chosen = [entry for entry in drafting(data)[:MOST] if entry["all"]["accepted_lengths"]]
    columns = 2 if len(chosen) in (2, 4) else min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = new_figure(
        heading("Accepted lengths", data),
        data,
        width=max(5.0, 3.6 * columns),
        height=1 + 2.4 * rows,
    )
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axes, entry in zip(panels, chosen, strict=False):
        counts = entry["all"]["accepted_lengths"]
        total = sum(counts)
        axes.bar(range(len(counts)), [100 * count / total for count in counts], **bar_style(1))
        axes.set_title(f"{entry['drafter']} (n = {total} steps)", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelbottom=True)
        tidy(axes)
        axes.set_xlabel("accepted length", fontsize=8)
        axes.grid(visible=False, axis="x")
    for axes in panels[len(chosen) :]:
        axes.set_visible(False)
    figure.supylabel("% of steps", fontsize=9)
    return figure


def by_source(data: Data) -> Figure:
    """Verified and accepted nodes per step, by the drafters that guessed them."""
    from specdec.evals.report.style import bar_style, new_figure, tidy

    chosen = [entry for entry in drafting(data)[:MOST] if entry["all"]["sources"]]
    names = list(dict.fromkeys(name for entry in chosen for name in entry["all"]["sources"]))
    figure = new_figure(
        heading("Nodes per step by drafter", data), data, width=11, height=2.4 + 0.45 * len(chosen)
    )
    places = range(len(chosen))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, kind in zip(panels, ("verified", "accepted"), strict=True):
        left = [0.0] * len(chosen)
        for index, name in enumerate(names):
            width = [
                entry["all"]["sources"].get(name, {}).get(kind, 0) / entry["all"]["steps"]
                for entry in chosen
            ]
            axes.barh(places, width, left=left, label=name, **bar_style(index))
            left = [a + b for a, b in zip(left, width, strict=True)]
        axes.set_xlim(0, 1.05 * max(left))
        axes.set_xlabel(
            f"nodes {kind} per step; one that two drafters guessed counts for both", fontsize=8
        )
        tidy(axes)
        axes.grid(visible=False, axis="y")
    panels[0].set_yticks(places, [entry["drafter"] for entry in chosen])
    panels[0].invert_yaxis()
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(6, len(names)),
        fontsize=8,
    )
    return figure


def _error_line(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    key: str,
    style: Mapping[str, Any],
    label: str | None,
) -> None:
    told = [row for row in rows if row[key] is not None]
    values = [row[key] for row in told]
    axes.errorbar(
        [row["position"] for row in told],
        [value["value"] for value in values],
        yerr=errors(values),
        capsize=2,
        elinewidth=0.8,
        label=label,
        **style,
    )


def _error_bars(
    axes: Axes,
    places: Sequence[float],
    values: Sequence[Mapping[str, Any] | None],
    width: float,
    style: Mapping[str, Any],
) -> None:
    told = [(place, value) for place, value in zip(places, values, strict=True) if value]
    axes.bar(
        [place for place, _ in told],
        [value["value"] for _, value in told],
        width,
        yerr=errors([value for _, value in told]),
        error_kw={"elinewidth": 0.8, "capsize": 1.5, "ecolor": "0.3"},
        **style,
    )
