"""The command `specdec bench latency`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals.report.options import Data, Out, PerTask, Task
from specdec.options import AsJson, engine_options


@engine_options(
    *("model", "weights", "kv", "backend", "device", "threads", "kv_memory_mib", "node_budget")
)
def latency(
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Drafters of ours, @fixed behind them for the whole budget every step; "
            "repeatable, others are held against the first; default: auto and ngram@fixed."
        ),
    ] = None,
    vs: Annotated[
        list[str] | None,
        typer.Option(
            help="Also measure: transformers, openvino, llama.cpp, each with :lookup too and "
            "@MODEL for another model, or [LABEL=]URL of a server; repeatable."
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
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Of the answers, several in turn; repeatable; default: 0.", min=0),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer; default: 256, or 32 if quick.", min=1)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Interleaved repetitions; default: 3, or 2.", min=1)
    ] = None,
    answers_only: Annotated[
        bool, typer.Option("--answers-only", help="Leave out steps by size, streams, bandwidth.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two prompts, few rounds, sizes and tokens.")
    ] = False,
    append: Annotated[
        Path | None, typer.Option(help="Append a line to this file and show the trend.")
    ] = None,
    out: Out = None,
    *,
    config: EngineConfig,
    as_json: AsJson = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables as README and docs have them.")
    ] = False,
) -> None:
    """One stream: first token, steps, tokens, memory, against the memory's floor and peers."""
    from specdec.evals.data.formats import read_all
    from specdec.evals.data.sample import first_of_each_task
    from specdec.evals.latency import bench, trend
    from specdec.evals.latency.markdown import markdown, short_markdown
    from specdec.evals.latency.prompts import PROMPTS, QUICK_PROMPTS
    from specdec.evals.latency.report import latency_report
    from specdec.evals.latency.settings import LatencySettings
    from specdec.evals.latency.side import STANDARD, Side
    from specdec.evals.report.journal import Journal
    from specdec.evals.report.report import ReportFolder, show

    if append is not None and answers_only:
        raise UsageError("--append keeps ratios of steps, which --answers-only leaves out")
    samples = read_all(data or ()) or list(QUICK_PROMPTS if quick else PROMPTS)
    settings = LatencySettings(
        config,
        tuple(map(Side.parse, drafter)) if drafter else STANDARD,
        tuple(vs or ()),
        openvino_model,
        gguf,
        tuple(first_of_each_task(samples, per_task, task or ())),
        tuple(temperature or (0.0,)),
        max_tokens=max_tokens or (32 if quick else 256),
        rounds=rounds or (2 if quick else 3),
        answers_only=answers_only,
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
    if as_markdown:
        print(short_markdown(report.data), markdown(report.data), sep="\n\n")
    else:
        show(report, as_json=as_json)
    if before is not None and not (as_json or as_markdown):
        print(f"\n{trend.render(trend.line_of(report.data), before)}")
