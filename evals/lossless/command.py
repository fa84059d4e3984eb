"""Command: the options of `specdec eval lossless`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

import typer

from specdec.config import DEFAULT_MODEL, EngineConfig
from specdec.errors import UsageError
from specdec.evals.report.options import ApiKey, Data, Out, PerTask, Task, Turns, given_of, refuse
from specdec.options import AsJson, engine_options

_OF_ENGINES = (
    *("node_budget", "control", "verification", "weights", "kv", "device", "backend"),
    *("threads", "max_model_len", "kv_memory_mib"),
)
_OF_URLS = ("against", "against_key", "api_key")
_OF_EQUALITY = ("seeds", "turns", "max_tokens", "tie_margin")
_OF_DISTRIBUTIONS = ("draws",)


@engine_options(
    *("node_budget", "verification", "weights", "kv", "device", "deterministic", "backend"),
    *("threads", "max_model_len"),
    control="fixed",
    kv_memory_mib=512,
)
def lossless(
    context: typer.Context,
    data: Data = None,
    per_task: PerTask = 8,
    task: Task = None,
    turns: Turns = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Drafters to try, each as --drafter takes them elsewhere; repeatable."),
    ] = None,
    temperature: Annotated[str, typer.Option(help="Of the answers, commas between.")] = "0,1",
    seeds: Annotated[int, typer.Option(help="Seeds for each turn above 0.", min=1)] = 2,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 128,
    concurrency: Annotated[
        int, typer.Option(help="Speculative answers at a time; plain ones come alone.", min=1)
    ] = 4,
    tie_margin: Annotated[
        float | None,
        typer.Option(
            help="What rounding can do to a logit's lead; default: by precision, 0.25 in bf16.",
            min=0,
        ),
    ] = None,
    distribution: Annotated[
        bool, typer.Option("--distribution", help="Test distributions by chi-squared instead.")
    ] = False,
    draws: Annotated[
        int, typer.Option(help="Draws of each prompt on each side, for --distribution.", min=20)
    ] = 400,
    url: Annotated[str | None, typer.Option(help="A running server to ask instead.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Another server, for the answers without speculation.")
    ] = None,
    api_key: ApiKey = None,
    against_key: Annotated[str | None, typer.Option(help="Key of --against.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder, hub id or built-in name; at a URL, its name there.")
    ] = None,
    *,
    config: EngineConfig,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Whether speculation changes the answers. Exit code 1 if it does."""
    given = given_of(context)
    if tie_margin is not None and not math.isfinite(tie_margin):
        raise UsageError(f"--tie-margin must be a number, not {tie_margin}")
    if url is not None:
        refuse(_OF_ENGINES, given, "is of engines in this process, not of a server at --url")
    else:
        refuse(_OF_URLS, given, "needs --url")
    if distribution:
        refuse(_OF_EQUALITY, given, "does not go with --distribution")
    else:
        refuse(_OF_DISTRIBUTIONS, given, "needs --distribution")

    from specdec.evals.data.formats import read_all
    from specdec.evals.data.questions import code_edits
    from specdec.evals.data.sample import first_of_each_task
    from specdec.evals.lossless.question import check_names, check_temperatures
    from specdec.evals.lossless.run import Run, default_drafters
    from specdec.evals.report.report import show

    samples = first_of_each_task(
        read_all(data) if data else code_edits(per_task), per_task, task or ()
    )
    drafters = tuple(drafter or ())
    check_names(drafters, "--drafter")
    if url is None:
        drafters = drafters or default_drafters(model or DEFAULT_MODEL)
        config = replace(config, model=model or DEFAULT_MODEL)
    run = Run(
        samples=samples,
        drafters=drafters,
        temperatures=check_temperatures(temperature),
        seeds=seeds,
        max_tokens=max_tokens,
        concurrency=concurrency,
        num_turns=turns,
        tie_margin=tie_margin,
        draws=draws,
        config=config if url is None else None,
        url=url,
        against=against,
        api_key=api_key,
        against_key=against_key,
        model=model,
        deterministic=config.deterministic,
        out=out,
    )
    report = run.distribution() if distribution else run.equality()
    show(report, as_json=as_json)
    if not report.data["is_lossless"]:
        raise typer.Exit(1)
