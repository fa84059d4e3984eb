"""The commands `specdec bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from specdec.config import DEFAULT_MODEL, EngineConfig
from specdec.evals.latency.command import latency
from specdec.evals.load.command import load
from specdec.evals.report.options import Out
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


bench_app.command(name="latency")(latency)
bench_app.command(name="load")(load)


@bench_app.command(name="server")
def bench_server(
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions.", min=1)] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds, tokens, streams.")] = False,
    weights: Weights = DEFAULTS.weights,
    threads: Threads = None,
    model: Model = DEFAULT_MODEL,
    as_json: AsJson = False,
) -> None:
    """What the server adds to the engine alone, and whether a crowd is felt. Exit code 1 if not."""
    from specdec.evals.load.overhead import OverheadSettings, measure, render

    config = EngineConfig(model=model, weights=weights, threads=threads)  # type: ignore[arg-type]
    settings = OverheadSettings(config, rounds=rounds)
    if quick:
        settings = OverheadSettings(config, rounds=2, steps=24, num_idle=10)
    found = measure(settings)
    print(json.dumps(found) if as_json else render(found))
    holds = (*found["holds"].values(), *found["crowd"]["holds"].values())
    raise typer.Exit(not all(holds))


@bench_app.command(name="suffix")
def bench_suffix(
    model: Model = DEFAULT_MODEL,
    as_json: AsJson = False,
) -> None:
    """What a step costs the suffix drafter at contexts of 1k, 10k and 100k tokens."""
    from dataclasses import asdict

    from specdec import checkpoints
    from specdec.drafters.training.prompts import standard_text
    from specdec.evals.report.tables import table
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
    data: Annotated[
        Path | None, typer.Option(help="Samples as JSON lines, for chat: docs/evals.md.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer; default: 96, or 32 if quick.", min=2)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Interleaved repetitions; default: 5, or 2.", min=1)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds, streams, tokens.")] = False,
    out: Out = None,
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
    from specdec.evals.crossover.bench import CrossoverSettings, Setting, parse_streams, run
    from specdec.evals.crossover.workloads import KINDS, WorkloadSettings

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
        WorkloadSettings(max_tokens or (32 if quick else 96), data),
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
    from specdec.evals.simulation.population import standard
    from specdec.evals.simulation.report import BATCH_SIZES, render, report
    from specdec.evals.simulation.virtual_machine import standard_machines

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
    from specdec.evals.kernel.bench import run

    raise typer.Exit(run(out, is_quick=quick, as_json=as_json))
