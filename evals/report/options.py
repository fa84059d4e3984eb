"""Options that measuring commands share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from specdec.errors import UsageError


def given_of(context: typer.Context) -> set[str]:
    """The parameters that the command line names; what has its default or is of the environment
    is not among them.
    """
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def refuse(names: Iterable[str], given: Iterable[str], why: str) -> None:
    """UsageError for the first of `names` that is given: an option that would change nothing.

    Example: `refuse(("against",), given_of(context), "needs --url")`.
    """
    for name in names:
        if name in given:
            raise UsageError(f"--{name.replace('_', '-')} {why}")


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
