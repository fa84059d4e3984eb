"""KernelPlots: the roofline, what each case achieves against what its device can do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from specdec.evals.kernel.tables import rate

MARKERS = "osD^v<>PX*hp"


def roofline(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: flops per byte against flops per second, log-log, one marker style per op.

    Cases that only move, or were not timed, are left out.
    """
    ceilings, machine = report["ceilings"], report["machine"]
    copy_rate, gemm_rate = ceilings["copy_bytes_per_second"], ceilings["gemm_flops_per_second"]
    cases = [case for case in report["cases"] if case["seconds"] is not None and case["flops"]]
    ridge = gemm_rate / copy_rate  # flops per byte from which on the product's rate is the limit
    intensities = [case["flops"] / case["bytes"] for case in cases]
    left, right = min([*intensities, ridge]) / 2, max([*intensities, ridge]) * 4

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots()
    axes.loglog([left, ridge], [left * copy_rate, gemm_rate], color="black", linewidth=1.5)
    axes.loglog([ridge, right], [gemm_rate, gemm_rate], color="black", linewidth=1.5)
    axes.annotate(
        f"product {rate(gemm_rate, 'FLOP/s')}",
        (right, gemm_rate),
        xytext=(-4, 5),
        textcoords="offset points",
        ha="right",
    )
    axes.annotate(
        f"copy {rate(copy_rate, 'B/s')}",
        ((left * ridge) ** 0.5, (left * ridge) ** 0.5 * copy_rate),
        xytext=(-8, 6),
        textcoords="offset points",
        ha="right",
    )
    for index, op in enumerate(dict.fromkeys(case["op"] for case in cases)):
        own = [case for case in cases if case["op"] == op]
        axes.plot(
            [case["flops"] / case["bytes"] for case in own],
            [case["flops"] / case["seconds"] for case in own],
            linestyle="none",
            marker=MARKERS[index % len(MARKERS)],
            color=f"C{index % 10}",
            markersize=7,
            alpha=0.8,
            label=op,
        )
    axes.set_xlim(left, right)
    axes.set_xlabel("flops per byte that must be moved")
    axes.set_ylabel("achieved FLOP/s")
    what = "kernels" if report["notice"] is None else "PyTorch references, not the kernels"
    axes.set_title(f"{what}: {machine['device']}, {machine['date']}")
    axes.grid(which="major", alpha=0.3)
    if cases:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=150)
