"""Options that measuring commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[
    list[Path] | None,
    typer.Option(help="Samples as JSON lines, Spec-Bench's for one (docs/evals.md); repeatable."),
]
PerTask = Annotated[int, typer.Option(help="Most samples of each task.", min=1)]
Task = Annotated[list[str] | None, typer.Option(help="Only this task; repeatable.")]
Turns = Annotated[int | None, typer.Option(help="Most turns of a sample; default: all.", min=1)]
ApiKey = Annotated[
    str | None, typer.Option(help="Key of the server to ask.", envvar="SPECDEC_API_KEY")
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the results: JSON, CSV, PNG, and an HTML page.")
]
