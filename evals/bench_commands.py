"""The commands `specdec bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from specdec.config import DEFAULT_MODEL, EngineConfig
from specdec.evals.crossover.command import crossover
from specdec.evals.latency.command import latency
from specdec.evals.load.command import load
from specdec.options import AsJson, Model, engine_options, need_command

bench_app = typer.Typer(
    help="Measure on this machine.", invoke_without_command=True, callback=need_command
)


bench_app.command(name="latency")(latency)
bench_app.command(name="load")(load)
bench_app.command(name="crossover")(crossover)


@bench_app.command(name="server")
@engine_options("model", "weights", "threads")
def bench_server(
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions.", min=1)] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds, tokens, streams.")] = False,
    *,
    config: EngineConfig,
    as_json: AsJson = False,
) -> None:
    """What the server adds to the engine alone, and whether a crowd is felt. Exit code 1 if not."""
    from specdec.evals.load.overhead import OverheadSettings, measure, render

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
