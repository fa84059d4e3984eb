"""The command `specdec bench crossover`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals.report.options import Data, Out, PerTask
from specdec.options import AsJson, engine_options


@engine_options(
    *("model", "drafter", "node_budget", "weights", "kv", "backend", "threads", "kv_memory_mib")
)
def crossover(
    concurrency: Annotated[str, typer.Option(help="Streams at a time, commas between.")] = "1,4,16",
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Of ours: off, fixed:N, adaptive; repeatable; default: off and adaptive, "
            "without peers fixed:4 and fixed:16 too."
        ),
    ] = None,
    vs: Annotated[
        list[str] | None,
        typer.Option(
            help="Also measure: openvino or openvino:lookup, with @FOLDER of another model, or a "
            "server, URL or LABEL=URL; repeatable."
        ),
    ] = None,
    openvino_model: Annotated[
        Path | None, typer.Option(help="The model as optimum-cli exports it, for --vs openvino.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="A task of the data, or without peers random, predicted edit; repeatable; "
            "default: all."
        ),
    ] = None,
    data: Data = None,
    per_task: PerTask = 8,
    temperature: Annotated[float, typer.Option(help="Of all answers.", min=0)] = 0.0,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer; default: 256, or 32 if quick.", min=2)
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions.", min=1)] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Two prompts a kind, short answers.")] = (
        False
    ),
    out: Out = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 if adaptive control fails a bound.")
    ] = False,
    *,
    config: EngineConfig,
    as_json: AsJson = False,
) -> None:
    """Many streams: from how many on drafts stop paying, and whether peers are faster."""
    from specdec.evals.crossover import bench
    from specdec.evals.crossover.report import crossover_report
    from specdec.evals.crossover.settings import SETTINGS, SETTINGS_VS, CrossoverSettings
    from specdec.evals.crossover.side import Setting
    from specdec.evals.data.formats import read_all
    from specdec.evals.data.sample import first_of_each_task
    from specdec.evals.latency.prompts import PROMPTS
    from specdec.evals.report.journal import Journal
    from specdec.evals.report.report import ReportFolder, show

    samples = read_all(data or ()) or list(PROMPTS)
    settings = CrossoverSettings(
        config,
        parse_streams(concurrency),
        tuple(map(Setting.parse, setting or (SETTINGS_VS if vs else SETTINGS))),
        tuple(vs or ()),
        openvino_model,
        tuple(first_of_each_task(samples, min(2, per_task) if quick else per_task)),
        tuple(kind or ()),
        temperature,
        max_tokens=max_tokens or (32 if quick else 256),
        rounds=rounds,
    )
    folder = ReportFolder(out, "crossover")
    servers = settings.check()
    with Journal(out / "crossover.part.jsonl" if out else None, settings.as_json()) as journal:
        report = crossover_report(bench.measure(settings, servers, journal))
    folder.write(report)
    journal.discard()
    show(report, as_json=as_json)
    is_failed = check and any(bound["failed"] for bound in report.data["bounds"])
    raise typer.Exit(1 if report.data["unequal"] or is_failed else 0)


def parse_streams(text: str) -> tuple[int, ...]:
    """Example: `parse_streams("1,4,16")`. Raises UsageError for what are no numbers."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise UsageError(f"--concurrency takes numbers and commas, as 1,4,16, not {text}") from None
