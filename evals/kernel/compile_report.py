"""Which kernels compile for which GPU, what they take there, and which must not ship."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specdec.errors import UsageError
from specdec.evals.report.progress import progress
from specdec.kernels import aot


def compile_kernels(target_names: Sequence[str]) -> dict[str, Any]:
    """Compile every variant of every kernel for the named targets; none named means all.

    The report's "variants" are CompiledVariants with their "problem", in the order of the modules.
    Says on stderr how far it is. Raises UsageError for an unknown target, or without Triton.
    """
    names = list(dict.fromkeys(target_names)) or list(aot.TARGETS)
    for name in names:
        if name not in aot.TARGETS:
            raise UsageError(f"unknown target {name!r}; choose from {', '.join(aot.TARGETS)}")
    try:
        import triton
    except ImportError as error:
        raise UsageError(f"compiling kernels needs triton, which is for Linux: {error}") from None
    started = time.perf_counter()
    jobs = aot.jobs(aot.MODULES, names)
    results: dict[tuple[str, str], aot.CompiledVariant] = {}
    with progress(len(jobs)) as advance:
        for compiled in aot.compile_jobs(jobs):
            advance(f"{compiled.name} for {compiled.target}")
            results[compiled.name, compiled.target] = compiled
    ordered = [results[job.name, job.target] for job in jobs]
    num_failed = sum(compiled.problem is not None for compiled in ordered)
    return {
        "triton": triton.__version__,
        "variants": [{**asdict(compiled), "problem": compiled.problem} for compiled in ordered],
        "num_compiled": len(ordered) - num_failed,
        "num_failed": num_failed,
        "seconds": round(time.perf_counter() - started, 1),
    }


def render(report: dict[str, Any]) -> str:
    """The report as a table, then how many compiled and how many did not."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column in ("variant", "target"):
        table.add_column(column, no_wrap=True)
    for column in ("registers", "shared", "spills"):
        table.add_column(column, justify="right")
    table.add_column("result")
    for row in report["variants"]:
        counts = (row["registers"], row["shared_bytes"], row["spill_bytes"])
        texts = ("-" if count is None else str(count) for count in counts)
        table.add_row(row["name"], row["target"], *texts, row["problem"] or "ok")
    console = Console(width=120, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    done = f"{report['num_compiled']} compiled with triton {report['triton']}"
    return (
        f"{capture.get()}per thread: registers, spilled bytes; per block: bytes of shared memory\n"
        f"{done} in {report['seconds']} s\n{report['num_failed']} failed"
    )
