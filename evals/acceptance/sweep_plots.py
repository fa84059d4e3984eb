"""Sweep plots: tokens per step and speed against node budget, depth or temperature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec.evals.acceptance.drawn import MOST, Data, Entry, drafting, errors, heading, speed_words

if TYPE_CHECKING:  # drawn only into a folder, and matplotlib is an extra
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SweepPlot:
    """A picture of one swept option, with a line for each drafter.

    Example: `SweepPlot("node_budget", "node budget", "node-budget").draw(data)`.
    """

    key: str  # of a setting
    label: str
    file_name: str

    def is_in(self, data: Data) -> bool:
        """Whether there are several values with figures."""
        entries = [entry for entry in drafting(data, but=self.key) if _tokens(entry)]
        return len({entry[self.key] for entry in entries} - {None}) > 1

    def draw(self, data: Data) -> Figure:
        """Tokens per step, and beside them the speed that they come to."""
        from specdec.evals.report.style import line_style, new_figure, tidy

        title = heading(f"Tokens per step and speed by {self.label}", data, but=self.key)
        entries = drafting(data, but=self.key)
        parts: list[tuple[str, Callable[[Entry], Mapping[str, Any] | None]]] = [
            ("tokens per step", _tokens)
        ]
        if any(_speed(entry) for entry in entries):
            parts.append((speed_words(data), _speed))
        figure = new_figure(title, data, width=5.5 * len(parts), height=4.8)
        panels = figure.subplots(1, len(parts), squeeze=False)[0]
        drafters = list(dict.fromkeys(entry["drafter"] for entry in entries))[:MOST]
        for axes, (label, figure_of) in zip(panels, parts, strict=True):
            for index, drafter in enumerate(drafters):
                own = [
                    (entry[self.key], found)
                    for entry in entries
                    if entry["drafter"] == drafter
                    and entry[self.key] is not None
                    and (found := figure_of(entry))
                ]
                own.sort(key=lambda point: point[0])
                axes.errorbar(
                    [place for place, _ in own],
                    [found["value"] for _, found in own],
                    yerr=errors([found for _, found in own]),
                    capsize=2,
                    elinewidth=0.8,
                    label=drafter,
                    **line_style(index),
                )
            axes.axhline(1, color="0.2", linewidth=1)
            axes.set(xlabel=self.label, ylabel=label)
            axes.set_xticks(sorted({entry[self.key] for entry in entries} - {None}))
            tidy(axes)
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=min(4, len(drafters)),
            fontsize=8,
        )
        return figure


SWEEPS = (
    SweepPlot("node_budget", "node budget", "node-budget"),
    SweepPlot("max_depth", "deepest draft", "depth"),
    SweepPlot("temperature", "temperature", "temperature"),
)


def _tokens(entry: Entry) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = entry["all"]["tokens_per_step"]["token_weighted"]
    return found


def _speed(entry: Entry) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = entry["all"]["decode_speedup"]
    return found
