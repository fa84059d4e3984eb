"""The commands `specdec eval` and `specdec kernels`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from specdec.config import DEFAULT_MODEL, EngineConfig
from specdec.evals.acceptance.command import acceptance
from specdec.evals.compare.command import compare
from specdec.evals.lossless.command import lossless
from specdec.evals.replay.command import replay
from specdec.evals.report.options import Out
from specdec.options import (
    DEFAULTS,
    AsJson,
    Backend,
    Model,
    Threads,
    need_command,
)

eval_app = typer.Typer(
    help="Measure what a setting does to the answers.",
    invoke_without_command=True,
    callback=need_command,
)
kernels_app = typer.Typer(
    help="The Triton kernels of the GPU path.", invoke_without_command=True, callback=need_command
)


@eval_app.command()
def quantization(
    text: Annotated[
        list[Path] | None, typer.Option(help="Local text to predict; repeatable.")
    ] = None,
    weights: Annotated[
        str, typer.Option(help="Precisions of the weights, separated by commas.")
    ] = "bf16,int8,int4,fp32",
    kv: Annotated[
        str, typer.Option(help="Precisions of the KV cache, separated by commas.")
    ] = DEFAULTS.kv,
    backend: Backend = DEFAULTS.backend,
    threads: Threads = None,
    model: Model = DEFAULT_MODEL,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Perplexity of texts under each precision, and how far it is from fp32's predictions."""
    from specdec.evals.quantization import evaluate, read_texts, report_of
    from specdec.evals.report.report import ReportFolder, show

    folder = ReportFolder(out, "quantization")
    texts = read_texts(text or ())
    found = evaluate(
        EngineConfig(
            model=model,
            backend=backend,  # type: ignore[arg-type]  # validated by EngineConfig
            threads=threads,
        ),
        texts,
        weights.split(","),  # type: ignore[arg-type]  # validated by EngineConfig
        kv.split(","),  # type: ignore[arg-type]  # validated by EngineConfig
    )
    report = report_of(found)
    folder.write(report)
    show(report, as_json=as_json)


eval_app.command(name="acceptance")(acceptance)
eval_app.command(name="compare")(compare)
eval_app.command(name="lossless")(lossless)
eval_app.command(name="replay")(replay)


@kernels_app.command(name="compile")
def compile_kernels(
    target: Annotated[
        list[str] | None, typer.Option(help="GPU to compile for; repeatable; default: all known.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile every kernel for every GPU; needs none. Exit code 1 if one must not ship."""
    from specdec.evals.kernel.compile_report import compile_kernels as run
    from specdec.evals.kernel.compile_report import render

    report = run(target or ())
    print(json.dumps(report) if as_json else render(report))
    if report["num_failed"]:
        raise typer.Exit(1)
