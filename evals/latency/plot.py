"""LatencyPlot: engine steps over rows and contexts, against the floor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot_steps(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: median ms over rows, one line per context with p90 shaded above it.

    The dashed line is the floor of the weights; a dotted one adds a context's keys and values.
    """
    cells, machine, target = report["steps"], report["machine"], report["target"]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    for index, context in enumerate(dict.fromkeys(cell["context"] for cell in cells)):
        own = [cell for cell in cells if cell["context"] == context]
        rows = [cell["rows"] for cell in own]
        p50, p90 = ([cell["step_ms"][p] for cell in own] for p in ("p50", "p90"))
        color = f"C{index}"
        axes.plot(rows, p50, marker="o", color=color, label=f"{context} tokens of context")
        axes.fill_between(rows, p50, p90, color=color, alpha=0.15)
        axes.axhline(own[0]["floor_with_kv_ms"], color=color, linestyle=":", linewidth=1)
    floor_ms = cells[0]["floor_ms"]
    axes.axhline(floor_ms, color="black", linestyle="--", label=f"floor {floor_ms:.1f} ms")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := sorted({cell["rows"] for cell in cells}), list(map(str, ticks)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of the step (nodes of the draft tree)")
    axes.set_ylabel("engine step, ms (median; shaded to p90)")
    axes.set_title(
        f"{target['model']}, {target['weights']}: {machine['processor']}, "
        f"{target['threads']} threads, {report['date']}"
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
