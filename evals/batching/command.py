"""Command: the options of `specdec sim batching`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import typer

from specdec.config import DEFAULT_MODEL, MAX_RUNNING, EngineConfig
from specdec.errors import UsageError
from specdec.evals.report.options import Out
from specdec.options import DEFAULTS, AsJson, need_command

sim_app = typer.Typer(
    help="Simulate serving, without a model.", invoke_without_command=True, callback=need_command
)


@sim_app.command()
def batching(
    requests: Annotated[int, typer.Option(help="How many.", min=1)] = 1000,
    slots: Annotated[
        str, typer.Option(help="Requests at a time, commas between several.")
    ] = "8,32",
    lengths: Annotated[
        str, typer.Option(help="Tokens of a request, drawn from SHORTEST-LONGEST.")
    ] = "10-500",
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.", min=0)] = 7,
    generator: Annotated[
        str, typer.Option(help="Whose generator draws the lengths: python or numpy.")
    ] = "python",
    arrivals: Annotated[
        float, typer.Option(help="Requests that arrive per step, 0 = all are there at once.")
    ] = 0.0,
    max_wait: Annotated[
        int, typer.Option(help="Steps that dynamic batching waits for a full batch.", min=0)
    ] = 16,
    measured: Annotated[
        bool, typer.Option("--measured", help="Also in seconds, by the model's measured steps.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Folder, hub id or built-in name, with --measured.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Its weights: auto, bf16, fp32, int8 or int4.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Its forward: native, torch or auto.")] = None,
    threads: Annotated[int | None, typer.Option(help="Its CPU threads.")] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Static, dynamic and continuous batching of the same requests: steps, seconds, used slots."""
    of_the_model = {"model": model, "weights": weights, "backend": backend, "threads": threads}
    if not measured:
        _refuse(of_the_model)
    if generator not in ("python", "numpy"):
        raise UsageError(f"--generator must be python or numpy, not {generator!r}")
    if not 0 <= arrivals < 1e9:  # nor NaN
        raise UsageError(f"--arrivals must be 0 or more, not {arrivals:g}")
    shortest, longest = _lengths(lengths)
    numbers = _slots(slots)
    config = None
    if measured:
        config = EngineConfig(
            model=model or DEFAULT_MODEL,
            weights=weights or DEFAULTS.weights,  # type: ignore[arg-type]  # validated there
            backend=backend or DEFAULTS.backend,  # type: ignore[arg-type]  # validated there
            threads=threads,
            max_running=max(DEFAULTS.max_running, *numbers),
        )

    from specdec.evals.batching.run import BatchingSettings, run
    from specdec.evals.report.report import show

    settings = BatchingSettings(
        requests, shortest, longest, numbers, seed, arrivals, max_wait, generator, config
    )
    show(run(settings, out), as_json=as_json)


def _refuse(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"--{name} needs --measured")


def _lengths(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text.strip())
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"--lengths must be like 10-500, the shortest at least 1, not {text!r}")
    return int(found[1]), int(found[2])


def _slots(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(re.fullmatch(r"\d{1,5}", part.strip()) for part in parts):
        raise UsageError(f"--slots takes numbers with commas between them, not {text!r}")
    numbers = tuple(dict.fromkeys(int(part) for part in parts))
    if not all(1 <= number <= MAX_RUNNING for number in numbers):
        raise UsageError(f"--slots must be between 1 and {MAX_RUNNING}, not {text!r}")
    return numbers
