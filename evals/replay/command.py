"""Command: the options of `specdec eval replay`."""

from __future__ import annotations

from typing import Annotated

import typer

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals.report.options import Data, Out, Task
from specdec.options import AsJson, engine_options

DRAFTERS = ("ngram", "suffix", "prediction", "prediction,suffix")
NODE_BUDGETS = "4,8,16,32"


@engine_options("model", "max_model_len", "token_budget")
def replay(
    data: Data = None,
    task: Task = None,
    per_task: Annotated[
        int | None, typer.Option(help="Most samples of each task; default: all.", min=1)
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Drafters to score, each as --drafter takes them elsewhere; repeatable; default: "
            + "; ".join(DRAFTERS)
            + "."
        ),
    ] = None,
    node_budget: Annotated[
        str, typer.Option(help="Most draft nodes per step, commas between several.")
    ] = NODE_BUDGETS,
    depth: Annotated[
        str | None, typer.Option(help="Deepest draft, commas between several; default: any.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="End longer answers here; default: none.", min=1)
    ] = None,
    step_cost: Annotated[
        str | None,
        typer.Option(help="Predict speed: FILE of step costs, or measured for the last ones here."),
    ] = None,
    *,
    config: EngineConfig,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Score drafters that need no model on recorded answers, without running the target."""
    if not data:
        raise UsageError(
            "--data FILE with recorded answers is needed: `specdec eval acceptance --out DIR`"
            " writes DIR/answers.jsonl with some"
        )

    from specdec.evals.acceptance.setting import Sweep, check_drafters, numbers
    from specdec.evals.data.formats import read_all
    from specdec.evals.data.sample import first_of_each_task
    from specdec.evals.replay.run import ReplaySettings, run
    from specdec.evals.report.report import show

    sweep = Sweep(
        tuple(drafter or DRAFTERS),
        numbers("--node-budget", node_budget, int),
        (None,) if depth is None else numbers("--depth", depth, int),
    )
    check_drafters(sweep.drafters)
    settings = ReplaySettings(
        config,
        first_of_each_task(read_all(data), per_task, task or ()),
        sweep,
        max_tokens,
        step_cost,
    )
    show(run(settings, out), as_json=as_json)
