"""Style: how plots look, so that they can be read in grey and by the colour-blind."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.evals.report.machine import machine_line

# Okabe and Ito's colours, from dark to light, so that neighbours differ in grey as well.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_LETTERS_PER_INCH = 12  # of a title, the narrow and the wide
_HATCHES = ("", "//", "..", "xx", "\\\\", "--", "oo")


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the index-th line; 49 lines differ.

    Example: `axes.plot(x, y, **line_style(0))`.
    """
    again = index + index // len(COLOURS)  # where colours begin anew, the others are shifted
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[again % len(_MARKERS)],
        "linestyle": _DASHES[again % len(_DASHES)],
        "markersize": 5,
    }


def bar_style(index: int) -> dict[str, Any]:
    """Colour and hatching of the index-th group of bars; 49 groups differ."""
    again = index + index // len(COLOURS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "hatch": _HATCHES[again % len(_HATCHES)],
        "edgecolor": "white",
        "linewidth": 0.5,
    }


def new_figure(
    title: str, data: Mapping[str, Any], *, width: float = 8.0, height: float = 5.0
) -> Figure:
    """An empty figure, in inches, with its title and below that what `data` is from."""
    figure = Figure(figsize=(width, height), layout="constrained")
    lines = [title]
    if "machine" in data:
        lines.append(f"{machine_line(data['machine'])}; {data['date']}")
    wrapped = [part for line in lines for part in wrap(line, int(width * _LETTERS_PER_INCH))]
    figure.suptitle("\n".join(wrapped), fontsize="medium")
    return figure


def tidy(axes: Axes) -> None:
    """A light grid behind, and no frame where nothing is."""
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
