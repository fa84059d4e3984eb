"""Options that several commands share, and what every group of commands does without one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

from specdec.config import EngineConfig

Model = Annotated[str, typer.Option(help="Folder of safetensors, hub id, or the built-in name.")]
Drafter = Annotated[
    str,
    typer.Option(help="Who guesses, commas between several; auto: who pays. docs/drafters.md"),
]
NodeBudget = Annotated[
    int | None,
    typer.Option(
        help="Most draft nodes of a request per step, 0 = plain decoding; default: as costs say."
    ),
]
Control = Annotated[
    str, typer.Option(help="adaptive: verify as many nodes as pay; fixed: always the budget.")
]
LatencyWeight = Annotated[
    float, typer.Option(help="Adaptive: 0 for most tokens in all, 1 for least mean time per token.")
]
Weights = Annotated[
    str,
    typer.Option(
        help="Weights: bf16, fp32, int8 or int4; GPU or torch also fp16; auto: the fastest that "
        "loses nothing."
    ),
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Rule = Annotated[str, typer.Option(help="coupled, rejection, or typical (lossy).")]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads; default: one for each physical core.")
]
Context = Annotated[int | None, typer.Option(help="Longest context; default: the model's.")]
KvMemory = Annotated[int, typer.Option(help="Memory of the KV cache and the drafters in MiB.")]
Kv = Annotated[
    str, typer.Option(help="Precision of the KV cache: auto, bf16, fp32, int8; GPU: fp8.")
]
Backend = Annotated[str, typer.Option(help="CPU forward: native (C++), torch, or auto.")]
Deterministic = Annotated[
    bool,
    typer.Option(
        help="Equal tokens whatever is drafted; a CPU always, a GPU may be faster without."
    ),
]
TokenBudget = Annotated[int, typer.Option(help="Most query tokens per step.")]
MaxRunning = Annotated[int, typer.Option(help="Most requests at once.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULTS = EngineConfig()


def need_command(context: typer.Context) -> None:
    """Answer a missing command with the help, over as many lines as it has."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


# The options of an engine, by the fields of EngineConfig that they set.
ENGINE_OPTIONS = {
    "model": Model,
    "drafter": Drafter,
    "node_budget": NodeBudget,
    "control": Control,
    "latency_weight": LatencyWeight,
    "verification": Rule,
    "weights": Weights,
    "device": Device,
    "threads": Threads,
    "max_model_len": Context,
    "kv_memory_mib": KvMemory,
    "kv": Kv,
    "backend": Backend,
    "deterministic": Deterministic,
    "token_budget": TokenBudget,
    "max_running": MaxRunning,
}


def engine_options(
    *names: str, but: Sequence[str] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options in place of its parameter `config`, which is made of them.

    No names are all of them, less those in `but`; `defaults` are those that differ from
    EngineConfig's. The options stand where `config` stood.

    Example: `@engine_options("model", "threads", kv_memory_mib=512)` above
    `def acceptance(data: Data = None, *, config: EngineConfig) -> None`.
    """
    wanted = dict.fromkeys((*(names or ENGINE_OPTIONS), *defaults))
    chosen = [name for name in wanted if name not in but]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        shared = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name, getattr(DEFAULTS, name)),
                annotation=ENGINE_OPTIONS[name],
            )
            for name in chosen
        ]
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            keyword = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters += shared if parameter.name == "config" else [keyword]
        signature = own.replace(parameters=parameters)

        @wraps(command)
        def run(**given: Any) -> None:
            bound = signature.bind(**given)
            bound.apply_defaults()
            config = EngineConfig(**{name: bound.arguments.pop(name) for name in chosen})
            command(config=config, **bound.arguments)

        run.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate
