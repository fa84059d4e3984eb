"""The commands `specdec bench` and `specdec kernels`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from specdec.config import DEFAULT_MODEL
from specdec.options import DEFAULTS, AsJson, Model, NodeBudget, Weights, need_command

bench_app = typer.Typer(
    help="Measure on this machine.", invoke_without_command=True, callback=need_command
)
kernels_app = typer.Typer(
    help="The Triton kernels of the GPU path.", invoke_without_command=True, callback=need_command
)


@bench_app.command()
def latency(
    vs: Annotated[
        list[str] | None, typer.Option(help="Also measure: transformers; repeatable.")
    ] = None,
    max_tokens: int = 128,
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions.", min=1)] = 3,
    weights: Weights = DEFAULTS.weights,
    model: Model = DEFAULT_MODEL,
    node_budget: NodeBudget = DEFAULTS.node_budget,
    as_json: AsJson = False,
) -> None:
    """Decode speed of one stream, interleaved: plain, with drafts, and peers."""
    from specdec.evals.latency import measure, render

    report = measure(
        model=model,
        weights=weights,  # type: ignore[arg-type]  # validated by EngineConfig
        node_budget=node_budget,
        peers=tuple(vs or ()),
        max_tokens=max_tokens,
        rounds=rounds,
    )
    print(json.dumps(report) if as_json else render(report))


@bench_app.command(name="kernels")
def bench_kernels(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("kernel-bench"),
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the cases.")] = False,
    as_json: AsJson = False,
) -> None:
    """The GPU kernels: right first, then how close to what the GPU can do. Exit code 1 if not."""
    from specdec.evals.kernel_bench import run

    raise typer.Exit(run(out, is_quick=quick, as_json=as_json))


@kernels_app.command(name="compile")
def compile_kernels(
    target: Annotated[
        list[str] | None, typer.Option(help="GPU to compile for; repeatable; default: all known.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile every kernel for every GPU; needs none. Exit code 1 if one must not ship."""
    from specdec.evals.kernel_report import compile_kernels as run
    from specdec.evals.kernel_report import render

    report = run(target or ())
    print(json.dumps(report) if as_json else render(report))
    if report["num_failed"]:
        raise typer.Exit(1)
