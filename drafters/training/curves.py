"""Curves: a picture of a training's loss and held-out acceptance."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from specdec.drafters.training.acceptance import KINDS
from specdec.drafters.training.loop import read_metrics

FILE = "curves.png"
NO_PLOT = "no curves: matplotlib is not installed; pip install 'specdec-server[evals]'"


def plot(out: Path) -> str | None:
    """Draw metrics.jsonl of a training into curves.png; returns why it could not, or None."""
    if find_spec("matplotlib") is None:
        return NO_PLOT
    from matplotlib.figure import Figure

    lines = read_metrics(out)
    steps = [line for line in lines if "epoch" not in line]
    epochs = [line for line in lines if "epoch" in line]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([line["step"] for line in steps], [line["loss"] for line in steps])
    left.set_xlabel("step")
    left.set_ylabel("training loss, nats")
    styles = {"greedy": "-", "sampled": "--"}
    for kind in KINDS:
        own = [line for line in epochs if line[kind]["num_positions"]]
        for head in range(len(own[0][kind]["top_1"]) if own else 0):
            right.plot(
                [line["epoch"] for line in own],
                [line[kind]["top_1"][head] for line in own],
                styles[kind],
                color=f"C{head}",
                marker="o",
                label=f"head {head}, {kind}",
            )
    right.set_xlabel("epoch")
    right.set_ylabel("held-out acceptance of the best guess")
    right.set_ylim(0, 1)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    if epochs:
        right.legend(frameon=False, fontsize="small")
    try:
        figure.savefig(out / FILE, dpi=150)
    except OSError as error:
        return f"no curves: cannot write {out / FILE}: {error.strerror}"
    return None
