"""The commands `specdec eval` and `specdec kernels`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from specdec.config import DEFAULT_MODEL, EngineConfig
from specdec.evals.report.options import Data, Out, PerTask, Task
from specdec.options import (
    DEFAULTS,
    AsJson,
    Backend,
    KvMemory,
    Model,
    NodeBudget,
    Threads,
    Weights,
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


@eval_app.command()
def acceptance(
    data: Data = None,
    per_task: PerTask = 20,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Drafters to compare, each as --drafter takes them; repeatable."),
    ] = None,
    task: Task = None,
    temperature: Annotated[float, typer.Option(help="Of all answers.", min=0)] = 0.0,
    no_noise: Annotated[
        bool, typer.Option("--no-noise", help="Draft plain top-k trees for sampled requests too.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 128,
    node_budget: NodeBudget = 32,
    weights: Weights = DEFAULTS.weights,
    backend: Backend = DEFAULTS.backend,
    threads: Threads = None,
    kv_memory_mib: KvMemory = 512,
    model: Model = DEFAULT_MODEL,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as README has it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tokens per step, draft cost and speed of drafters by task; the answers must be equal."""
    from specdec.evals.acceptance.bench import AcceptanceSettings, evaluate, markdown, render
    from specdec.evals.data.formats import read_samples
    from specdec.evals.data.questions import code_edits
    from specdec.evals.data.sample import first_of_each_task

    samples = [sample for file in data or () for sample in read_samples(file)]
    asked = first_of_each_task([*samples, *code_edits(per_task)], per_task, task or ())
    settings = AcceptanceSettings(
        EngineConfig(
            model=model,
            weights=weights,  # type: ignore[arg-type]  # validated by EngineConfig
            backend=backend,  # type: ignore[arg-type]  # validated by EngineConfig
            node_budget=node_budget,
            threads=threads,
            kv_memory_mib=kv_memory_mib,
            max_model_len=4096,
        ),
        asked,
        tuple(
            drafter or ("ngram", "suffix", "prediction", "medusa", "small-model", "suffix,medusa")
        ),
        temperature=temperature,
        max_tokens=max_tokens,
        uses_noise=not no_noise,
    )
    report = evaluate(settings)
    show = markdown if as_markdown else render
    print(json.dumps(report) if as_json else show(report))
    if any(found["all"]["unequal_answers"] for found in report["drafters"].values()):
        raise typer.Exit(1)


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
