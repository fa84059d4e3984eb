"""specdec bench load: the options of a load test."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals.report.options import ApiKey, Data, Out, Task, given_of, refuse
from specdec.options import AsJson, engine_options

if TYPE_CHECKING:
    from specdec.evals.load.lengths import Lengths
    from specdec.evals.load.prompts import Prompts


_OF_A_SERVER = (
    *("max_running", "drafter", "node_budget", "control", "weights", "kv", "backend", "threads"),
    *("kv_memory_mib", "model"),
)
_OF_URLS = ("api_key", "served_model")


@engine_options(*_OF_A_SERVER)
def load(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(help="OpenAI-compatible server to ask; default: start one of our own."),
    ] = None,
    api_key: ApiKey = None,
    served_model: Annotated[
        str | None, typer.Option(help="Model to ask --url for; default: the first it names.")
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Closed loop: clients at a time, commas between; default: 1,2,4,8."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Open loop: requests per second, commas between.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Of --rate: 1 = Poisson, below 1 in bursts, above 1 more even.")
    ] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option(help="Counted requests of a level; default: 8 per client, or 64.", min=1),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Count what is sent in so many seconds per level instead.")
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            help="Requests before the counted ones; default: until every client has an answer, or "
            "a tenth with --rate.",
            min=0,
        ),
    ] = None,
    data: Data = None,
    task: Task = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="Words of prompts that are made up: 200, or 100-400.")
    ] = "200",
    output_tokens: Annotated[
        str, typer.Option(help="Length of answers, of --data the longest: 128, or 64-256.")
    ] = "128",
    shared_prefix: Annotated[
        int, typer.Option(help="Words before them that all have in common.", min=0)
    ] = 0,
    temperature: Annotated[float, typer.Option(help="Of all answers.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides prompts, lengths and arrivals.")] = 0,
    goodput: Annotated[
        str | None,
        typer.Option(help="Goals in ms of a good answer: ttft:1000,tpot:50,e2el:5000."),
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Of the server, for the cost of a million tokens.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Compare values of a request's field, or of an option of a server of our own: "
            "key=a,b,c; + for the comma of several drafters."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for a whole answer.")] = 600.0,
    *,
    config: EngineConfig,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """A server under load: times, throughput, goodput, the knee. Exit code 1 if it gave out."""
    from specdec.evals.load.bench import LoadSettings, run
    from specdec.evals.load.extent import Extent
    from specdec.evals.load.goals import Goals
    from specdec.evals.load.lengths import Lengths
    from specdec.evals.load.level import parse_levels
    from specdec.evals.load.sweep import parse_sweep

    for option, number in (
        ("--burstiness", burstiness),
        ("--duration", duration),
        ("--price-per-hour", price_per_hour),
        ("--timeout", timeout),
    ):
        if number is not None and not 0 < number < math.inf:
            raise UsageError(f"{option} must be more than 0, not {number}")
    if requests is not None and duration is not None:
        raise UsageError("choose --requests or --duration")
    given = given_of(context)
    if url is None:
        refuse(_OF_URLS, given, "needs --url; a server of our own has --model")
    else:
        refuse(_OF_A_SERVER, given, "is for the start of a server: use it without --url")
    if rate is None:
        refuse(("burstiness",), given, "is of the arrivals of --rate")
    prompts, asked = _prompts(
        data or (),
        task or (),
        Lengths.parse(prompt_tokens, "--prompt-tokens"),
        Lengths.parse(output_tokens, "--output-tokens"),
        shared_prefix,
        seed,
    )
    settings = LoadSettings(
        levels=parse_levels(concurrency, rate),
        series=parse_sweep(sweep, config if url is None else None),
        extent=Extent(requests, duration, warmup),
        prompts=prompts,
        asked=asked,
        url=url,
        api_key=api_key if url is not None else None,
        served_model=served_model,
        temperature=temperature,
        burstiness=burstiness,
        seed=seed,
        goals=Goals.parse(goodput) if goodput is not None else None,
        price=price_per_hour,
        timeout_s=timeout,
    )
    raise typer.Exit(run(settings, out, as_json=as_json))


def _prompts(
    files: Sequence[Path],
    tasks: Sequence[str],
    prompt_lengths: Lengths,
    output_lengths: Lengths,
    shared_prefix: int,
    seed: int,
) -> tuple[Prompts, str]:
    """What is asked, and that in words."""
    from specdec.evals.data.formats import read_all
    from specdec.evals.data.sample import first_of_each_task
    from specdec.evals.load.prompts import SamplePrompts, SyntheticPrompts

    if not files:
        if tasks:
            raise UsageError("--task chooses from --data; prompts that are made up have none")
        shared = f" after {shared_prefix} in common" if shared_prefix else ""
        words = f"prompts of {prompt_lengths} words drawn at random{shared}"
        made_up = SyntheticPrompts(prompt_lengths, output_lengths, seed, shared_prefix)
        return made_up, f"{words}, answers of {output_lengths} tokens"
    if shared_prefix:
        raise UsageError("--shared-prefix is for prompts that are made up: leave out --data")
    samples = read_all(files)
    asked = first_of_each_task(samples, tasks=tasks)
    random.Random(seed).shuffle(asked)  # files have one task after the other
    names = ", ".join(file.name for file in files)
    words = f"{len(asked)} samples of {names}, answers of at most {output_lengths} tokens"
    return SamplePrompts(asked, output_lengths, seed), words
