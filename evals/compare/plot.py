"""Forest plot: each figure's ratio to the base with its interval, and a line at 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.evals.compare.change import Change, Mark
from specdec.evals.compare.run import Run
from specdec.evals.report.style import COLOURS, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 60
LONGEST_LABEL = 70
# Shape, fill and colour all tell the mark.
_LOOKS: Mapping[Mark, dict[str, Any]] = {
    Mark.WORSE: {"marker": "X", "color": COLOURS[2], "markersize": 9},
    Mark.BETTER: {"marker": "^", "color": COLOURS[1], "markersize": 8},
    Mark.UNSURE: {"marker": "o", "color": "0.45", "markersize": 6, "markerfacecolor": "white"},
    Mark.SAME: {"marker": "s", "color": "0.45", "markersize": 4},
}


def forest(
    ordered: Sequence[tuple[Run, Change]], tolerance: float, data: Mapping[str, Any]
) -> Figure:
    """The first MOST_ROWS changes that have a ratio, from the top; `data` is the report's."""
    rows = [item for item in ordered if item[1].ratio is not None]
    shown = rows[:MOST_ROWS]
    title = "Ratio to the base, 95 % intervals"
    if len(rows) > len(shown):
        title += f" (the first {len(shown)} of {len(rows)})"
    figure = new_figure(title, data, width=10, height=2 + 0.3 * max(3, len(shown)))
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=1)
    axes.axvspan(1 - tolerance, 1 + tolerance, color="0.92", zorder=0)
    names = _names([run for run, _ in shown])
    for place, (_, change) in enumerate(shown):
        assert change.ratio is not None
        value, low, high = change.ratio.value, change.ratio.low, change.ratio.high
        look = _LOOKS[change.mark]
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color=look["color"], linewidth=1.5)
        axes.plot([value], [place], linestyle="none", **look)
    axes.set_yticks(
        range(len(shown)),
        [_label(change, names[run.file]) for run, change in shown],
        fontsize=8,
    )
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel("run / base")
    _legend(figure, {change.mark for _, change in shown})
    tidy(axes)
    return figure


def _names(runs: Sequence[Run]) -> dict[Path, str]:
    """What tells several runs apart; nothing of a single one."""
    files = {run.file for run in runs}
    has_folders = len({file.name for file in files}) < len(files)
    return {
        file: f" [{file.parent.name if has_folders else file.stem}]" if len(files) > 1 else ""
        for file in files
    }


def _label(change: Change, run: str) -> str:
    name = f"{change.of}: {change.named}"
    if len(name) > LONGEST_LABEL:
        name = f"{name[: LONGEST_LABEL - 3]}..."
    name += run
    mark = change.mark
    return f"{name}  {mark.shown}" if mark in (Mark.WORSE, Mark.BETTER) else name


def _legend(figure: Figure, marks: set[Mark]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="none", label=mark.shown, **_LOOKS[mark])
        for mark in Mark
        if mark in marks
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
