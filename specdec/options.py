"""Options that several commands share, and what every group of commands does without one."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from specdec.config import EngineConfig

Model = Annotated[str, typer.Option(help="Folder of safetensors, hub id, or the built-in name.")]
Drafter = Annotated[
    str, typer.Option(help="Who guesses, commas between several: docs/drafters.md.")
]
NodeBudget = Annotated[
    int, typer.Option(help="Most draft nodes of a request per step, 0 = plain decoding.")
]
Control = Annotated[
    str, typer.Option(help="adaptive: verify as many nodes as pay; fixed: always the budget.")
]
LatencyWeight = Annotated[
    float, typer.Option(help="Adaptive: 0 for most tokens in all, 1 for least mean time per token.")
]
Weights = Annotated[
    str, typer.Option(help="Weights: auto, bf16, fp32, int8 or int4; GPU or torch also fp16.")
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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULTS = EngineConfig()


def need_command(context: typer.Context) -> None:
    """Answer a missing command with the help, over as many lines as it has."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)
