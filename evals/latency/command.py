"""The command `specdec bench latency`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.config import DEFAULT_MODEL, EngineConfig
from specdec.evals.report.options import Data, Out, PerTask, Task
from specdec.options import (
    DEFAULTS,
    AsJson,
    Backend,
    Device,
    Kv,
    KvMemory,
    Model,
    NodeBudget,
    Threads,
    Weights,
)


def latency(
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Drafters of ours, @fixed behind them for the whole budget every step; "
            "repeatable; default: ngram@fixed and the engine's."
        ),
    ] = None,
    vs: Annotated[
        list[str] | None,
        typer.Option(
            help="Also measure: transformers, openvino, llama.cpp, each with :lookup too, vllm, "
            "vllm:ngram, or the URL of a server; repeatable."
        ),
    ] = None,
    openvino_model: Annotated[
        Path | None, typer.Option(help="The model as optimum-cli exports it, for --vs openvino.")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="The model as a GGUF file, for --vs llama.cpp.")
    ] = None,
    data: Data = None,
    per_task: PerTask = 20,
    task: Task = None,
    temperature: Annotated[float, typer.Option(help="Of all answers.", min=0)] = 0.0,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer; default: 128, or 32 if quick.", min=1)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Interleaved repetitions; default: 5, or 2.", min=1)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds, sizes and tokens.")] = False,
    append: Annotated[
        Path | None, typer.Option(help="Append a line to this file and show the trend.")
    ] = None,
    out: Out = None,
    weights: Weights = DEFAULTS.weights,
    kv: Kv = DEFAULTS.kv,
    backend: Backend = DEFAULTS.backend,
    device: Device = DEFAULTS.device,
    threads: Threads = None,
    kv_memory_mib: KvMemory = DEFAULTS.kv_memory_mib,
    model: Model = DEFAULT_MODEL,
    node_budget: NodeBudget = DEFAULTS.node_budget,
    as_json: AsJson = False,
) -> None:
    """One stream: first token, steps, tokens, memory, against the memory's floor and peers."""
    from specdec.evals.data.formats import read_all
    from specdec.evals.data.sample import first_of_each_task
    from specdec.evals.latency import bench, trend
    from specdec.evals.latency.prompts import PROMPTS
    from specdec.evals.latency.report import latency_report
    from specdec.evals.latency.settings import LatencySettings
    from specdec.evals.latency.side import STANDARD, Side
    from specdec.evals.report.journal import Journal
    from specdec.evals.report.report import ReportFolder, show

    config = EngineConfig(
        model=model,
        weights=weights,  # type: ignore[arg-type]  # validated by EngineConfig
        kv=kv,  # type: ignore[arg-type]  # validated by EngineConfig
        backend=backend,  # type: ignore[arg-type]  # validated by EngineConfig
        device=device,
        node_budget=node_budget,
        threads=threads,
        kv_memory_mib=kv_memory_mib,
    )
    samples = read_all(data or ()) or list(PROMPTS)
    settings = LatencySettings(
        config,
        tuple(map(Side.parse, drafter or STANDARD)),
        tuple(vs or ()),
        openvino_model,
        gguf,
        tuple(first_of_each_task(samples, per_task, task or ())),
        temperature,
        max_tokens=max_tokens or (32 if quick else 128),
        rounds=rounds or (2 if quick else 5),
    )
    if quick:
        settings = settings.quick()
    folder = ReportFolder(out, "latency")
    before = None if append is None else trend.read(append)
    servers = settings.check()
    with Journal(out / "latency.part.jsonl" if out else None, settings.as_json()) as journal:
        report = latency_report(bench.measure(settings, servers, journal))
    folder.write(report)
    journal.discard()
    if append is not None:
        trend.append(append, trend.line_of(report.data))
    show(report, as_json=as_json)
    if before is not None and not as_json:
        print(f"\n{trend.render(trend.line_of(report.data), before)}")
