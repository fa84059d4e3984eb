"""specdec eval acceptance: its options, checked before anything is loaded or asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from specdec.config import DEFAULT_MODEL, EngineConfig
from specdec.evals.report.options import ApiKey, Data, Out, PerTask, Task, Turns, given_of, refuse
from specdec.options import AsJson, engine_options

if TYPE_CHECKING:  # the command line starts without them
    from collections.abc import Sequence
    from pathlib import Path

    from specdec.evals.acceptance.setting import Sweep
    from specdec.evals.data.sample import Sample

_DRAFTERS = ("ngram", "suffix", "prediction")
_TRAINED = ("medusa", "small-model", "suffix,medusa")  # for the built-in model
_NODE_BUDGET = "32"
# What a server has decided when it was started, and what only a server has.
_OF_THE_ENGINE = (
    *("control", "verification", "no_noise", "model", "weights", "kv", "device", "backend"),
    *("threads", "max_model_len", "kv_memory_mib"),
)
_OF_A_SERVER = ("api_key", "served_model")


@engine_options(
    *("model", "weights", "kv", "device", "backend", "threads", "max_model_len", "verification"),
    control="fixed",
    kv_memory_mib=512,
)
def acceptance(
    context: typer.Context,
    data: Data = None,
    code_edits: Annotated[
        bool | None,
        typer.Option(
            "--code-edits/--no-code-edits",
            help="Ask for edits of code, samples of our own; default: only without --data.",
            show_default=False,
        ),
    ] = None,
    per_task: PerTask = 20,
    task: Task = None,
    turns: Turns = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Drafters to compare, each as --drafter of serve; repeatable."),
    ] = None,
    node_budget: Annotated[
        str | None,
        typer.Option(help="Most draft nodes per step, commas between several; default: 32."),
    ] = None,
    depth: Annotated[
        str | None, typer.Option(help="Deepest drafts, commas between several; default: any.")
    ] = None,
    temperature: Annotated[str, typer.Option(help="Of all answers, commas between several.")] = "0",
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 128,
    no_noise: Annotated[
        bool, typer.Option("--no-noise", help="Draft plain top-k trees for sampled requests too.")
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="Ask this OpenAI-compatible server, not an engine of ours.")
    ] = None,
    api_key: ApiKey = None,
    served_model: Annotated[
        str | None, typer.Option(help="The server's model; default: its first.")
    ] = None,
    *,
    config: EngineConfig,
    out: Out = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as README has it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tokens per step, acceptance and speed of drafters by task. Exit code 1 if answers differ."""
    given = given_of(context)
    if url is None:
        refuse(_OF_A_SERVER, given, "is a server's: use it with --url")
    else:
        refuse(_OF_THE_ENGINE, given, "is for the start of a server: use it without --url")

    from specdec.evals.acceptance.report import has_unequal
    from specdec.evals.acceptance.run import AcceptanceSettings, Address, run
    from specdec.evals.acceptance.setting import SERVER
    from specdec.evals.acceptance.tables import markdown
    from specdec.evals.report.report import show

    if drafter is None:
        trained = _TRAINED if config.model == DEFAULT_MODEL else ()
        drafter = [SERVER] if url else [*_DRAFTERS, *trained]
    settings = AcceptanceSettings(
        _samples(data or (), code_edits, per_task, task or ()),
        _sweep(drafter, node_budget or (None if url else _NODE_BUDGET), depth, temperature),
        config,
        max_tokens=max_tokens,
        num_turns=turns,
        uses_noise=not no_noise,
        address=Address(url, api_key, served_model) if url else None,
    )
    report = run(settings, out)
    if as_markdown:
        print(markdown(report.data))
    else:
        show(report, as_json=as_json)
    if has_unequal(report.data):
        raise typer.Exit(1)


def _samples(
    files: Sequence[Path], has_code_edits: bool | None, per_task: int, tasks: Sequence[str]
) -> list[Sample]:
    from specdec.evals.data import questions
    from specdec.evals.data.formats import read_all
    from specdec.evals.data.sample import first_of_each_task

    samples = read_all(files)
    if has_code_edits or (has_code_edits is None and not files):
        samples += questions.code_edits(per_task)
    return first_of_each_task(samples, per_task, tasks)


def _sweep(
    drafters: Sequence[str], node_budgets: str | None, depths: str | None, temperatures: str
) -> Sweep:
    from specdec.evals.acceptance.setting import Sweep, numbers

    return Sweep(
        tuple(drafters),
        numbers("--node-budget", node_budgets, int) if node_budgets else (None,),
        numbers("--depth", depths, int) if depths else (None,),
        numbers("--temperature", temperatures, float),
    )
