"""The command `specdec eval compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.evals.report.options import Out
from specdec.options import AsJson


def compare(
    reports: Annotated[
        list[Path], typer.Argument(help="Reports' JSON or their folders; the first is the base.")
    ],
    tolerance: Annotated[
        float, typer.Option(help="Smaller changes are not marked, in %.", min=0, max=100)
    ] = 2.0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Hold runs of one measurement against the first. Exit code 1 if something is worse."""
    from specdec.errors import UsageError
    from specdec.evals.compare.comparison import NAME, Comparison
    from specdec.evals.compare.run import Run
    from specdec.evals.report.report import ReportFolder, show

    if len(reports) < 2:
        raise UsageError("give two reports or more: the first is the base")
    folder = ReportFolder(out, NAME)
    comparison = Comparison.of([Run.read(path) for path in reports], tolerance / 100)
    report = comparison.report()
    folder.write(report)
    show(report, as_json=as_json)
    if comparison.num_worse:
        raise typer.Exit(1)
