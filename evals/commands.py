"""The commands `specdec bench`, `specdec eval` and `specdec kernels`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from specdec.config import DEFAULT_MODEL, EngineConfig
from specdec.errors import UsageError
from specdec.options import (
    DEFAULTS,
    AsJson,
    Backend,
    Drafter,
    Kv,
    KvMemory,
    Model,
    NodeBudget,
    Threads,
    Weights,
    need_command,
)

bench_app = typer.Typer(
    help="Measure on this machine.", invoke_without_command=True, callback=need_command
)
eval_app = typer.Typer(
    help="Measure what a setting does to the answers.",
    invoke_without_command=True,
    callback=need_command,
)
kernels_app = typer.Typer(
    help="The Triton kernels of the GPU path.", invoke_without_command=True, callback=need_command
)


@bench_app.command()
def latency(
    vs: Annotated[
        list[str] | None,
        typer.Option(help="Also measure: transformers, openvino, llama.cpp; repeatable."),
    ] = None,
    openvino_model: Annotated[
        Path | None, typer.Option(help="The model as optimum-cli exports it, for --vs openvino.")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="The model as a GGUF file, for --vs llama.cpp.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer; default: 128, or 32 if quick.", min=1)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Interleaved repetitions; default: 5, or 2.", min=1)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds, sizes and tokens.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of the steps.")] = None,
    append: Annotated[
        Path | None, typer.Option(help="Append a line to this file and show the trend.")
    ] = None,
    weights: Weights = DEFAULTS.weights,
    kv: Kv = DEFAULTS.kv,
    backend: Backend = DEFAULTS.backend,
    threads: Threads = None,
    kv_memory_mib: KvMemory = DEFAULTS.kv_memory_mib,
    model: Model = DEFAULT_MODEL,
    node_budget: NodeBudget = DEFAULTS.node_budget,
    as_json: AsJson = False,
) -> None:
    """Steps against what memory can give, streams, and whole answers, ours and peers'."""
    from specdec.evals import latency_table, latency_trend
    from specdec.evals.latency import LatencySettings, measure

    config = EngineConfig(
        model=model,
        weights=weights,  # type: ignore[arg-type]  # validated by EngineConfig
        kv=kv,  # type: ignore[arg-type]  # validated by EngineConfig
        backend=backend,  # type: ignore[arg-type]  # validated by EngineConfig
        node_budget=node_budget,
        threads=threads,
        kv_memory_mib=kv_memory_mib,
    )
    settings = LatencySettings(
        config,
        tuple(vs or ()),
        openvino_model,
        gguf,
        max_tokens=max_tokens or (32 if quick else 128),
        rounds=rounds or (2 if quick else 5),
    )
    if plot is not None:
        _check_plot(plot)
    before = None if append is None else latency_trend.read(append)
    report = measure(settings.quick() if quick else settings)
    if append is not None:
        latency_trend.append(append, latency_trend.line_of(report))
    print(json.dumps(report) if as_json else latency_table.render(report))
    if before is not None and not as_json:
        print(f"\n{latency_trend.render(latency_trend.line_of(report), before)}")
    if plot is not None:
        from specdec.evals.latency_plot import plot_steps

        plot_steps(report, plot)


def _check_plot(file: Path) -> None:
    """Minutes of measuring must not be lost to a picture that cannot be drawn or written."""
    if file.suffix != ".png":
        raise UsageError(f"--plot writes a PNG: call it {file.with_suffix('.png')}")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'specdec-server[evals]'")
    try:
        file.open("ab").close()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None


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
    as_json: AsJson = False,
) -> None:
    """Perplexity of texts under each precision, and how far it is from fp32's predictions."""
    from specdec.evals.quantization import evaluate, read_texts, render

    texts = read_texts(text or ())
    report = evaluate(
        EngineConfig(
            model=model,
            backend=backend,  # type: ignore[arg-type]  # validated by EngineConfig
            threads=threads,
        ),
        texts,
        weights.split(","),  # type: ignore[arg-type]  # validated by EngineConfig
        kv.split(","),  # type: ignore[arg-type]  # validated by EngineConfig
    )
    print(json.dumps(report) if as_json else render(report))


@eval_app.command()
def acceptance(
    questions: Annotated[
        Path | None,
        typer.Option(help="Spec-Bench's question.jsonl; without it only the code edits are run."),
    ] = None,
    per_task: Annotated[int, typer.Option(help="Questions of each task.", min=1)] = 20,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Drafters to compare, each as --drafter takes them; repeatable."),
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only this task; repeatable.")] = None,
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
    from specdec.evals.acceptance import AcceptanceSettings, evaluate, markdown, render
    from specdec.evals.questions import code_edits, spec_bench

    asked = spec_bench(questions, per_task) if questions is not None else []
    asked += code_edits(per_task)
    if task:
        asked = [question for question in asked if question.task in task]
    if not asked:
        raise UsageError("no question is of these tasks")
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


@bench_app.command(name="suffix")
def bench_suffix(
    model: Model = DEFAULT_MODEL,
    as_json: AsJson = False,
) -> None:
    """What a step costs the suffix drafter at contexts of 1k, 10k and 100k tokens."""
    from dataclasses import asdict

    from specdec import checkpoints
    from specdec.drafters.training.prompts import standard_text
    from specdec.evals.latency_table import table
    from specdec.evals.suffix_cost import suffix_costs
    from specdec.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(checkpoints.resolve(model))
    costs = [asdict(cost) for cost in suffix_costs(tokenizer.encode(standard_text()))]
    if as_json:
        print(json.dumps(costs))
        return
    print("\n".join(table(list(costs[0]), [[f"{x:.4g}" for x in c.values()] for c in costs])))


@bench_app.command()
def crossover(
    concurrency: Annotated[
        str | None,
        typer.Option(help="Streams at a time; default: 1,2,4,8,16,32,64, or 1,4,16 if quick."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="off, fixed:N, adaptive; repeatable; default: these, N 4 and 16."),
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="chat, code-edit, random; repeatable; default: all.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help="Spec-Bench's question.jsonl, for chat.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer; default: 96, or 32 if quick.", min=2)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Interleaved repetitions; default: 5, or 2.", min=1)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds, streams, tokens.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("crossover"),
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 if adaptive control fails a bound.")
    ] = False,
    drafter: Drafter = DEFAULTS.drafter,
    node_budget: NodeBudget = DEFAULTS.node_budget,
    weights: Weights = DEFAULTS.weights,
    kv: Kv = DEFAULTS.kv,
    backend: Backend = DEFAULTS.backend,
    threads: Threads = None,
    kv_memory_mib: KvMemory = DEFAULTS.kv_memory_mib,
    model: Model = DEFAULT_MODEL,
    as_json: AsJson = False,
) -> None:
    """From how many streams on drafts stop paying, and whether adaptive control sees it."""
    from specdec.evals.crossover import CrossoverSettings, Setting, parse_streams, run
    from specdec.evals.workloads import KINDS, WorkloadSettings

    config = EngineConfig(
        model=model,
        drafter=drafter,
        node_budget=node_budget,
        weights=weights,  # type: ignore[arg-type]  # validated by EngineConfig
        kv=kv,  # type: ignore[arg-type]  # validated by EngineConfig
        backend=backend,  # type: ignore[arg-type]  # validated by EngineConfig
        threads=threads,
        kv_memory_mib=kv_memory_mib,
    )
    settings = CrossoverSettings(
        config,
        parse_streams(concurrency or ("1,4,16" if quick else "1,2,4,8,16,32,64")),
        tuple(map(Setting.parse, setting or ("off", "fixed:4", "fixed:16", "adaptive"))),
        tuple(kind or KINDS),
        WorkloadSettings(max_tokens or (32 if quick else 96), questions),
        rounds=rounds or (2 if quick else 5),
        min_requests=4 if quick else 12,
    )
    raise typer.Exit(run(settings, out, as_json=as_json, must_hold=check))


@bench_app.command()
def simulate(
    quick: Annotated[bool, typer.Option("--quick", help="A few of the cases.")] = False,
    as_json: AsJson = False,
) -> None:
    """Adaptive control against every fixed node budget, on machines that are simulated."""
    from specdec.evals.population import standard
    from specdec.evals.simulation_report import BATCH_SIZES, render, report
    from specdec.evals.virtual_machine import standard_machines

    step = 3 if quick else 1
    found = report(
        machines=standard_machines()[::step],
        populations=standard()[::step],
        batch_sizes=BATCH_SIZES[::step],
    )
    print(json.dumps(found) if as_json else render(found))


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
