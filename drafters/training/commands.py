"""The commands `specdec train medusa` and `specdec train small-model`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.config import DEFAULT_MODEL, EngineConfig
from specdec.options import AsJson, Model, need_command

train_app = typer.Typer(
    help="Train drafters on what the target itself wrote.",
    invoke_without_command=True,
    callback=need_command,
)

CorpusFolder = Annotated[Path, typer.Option(help="Folder of what the target generated.")]
Out = Annotated[Path, typer.Option(help="Folder to write; a training in it goes on.")]
TargetName = Annotated[
    str | None,
    typer.Option("--model", help="The target, if it lies elsewhere than the corpus says."),
]
Epochs = Annotated[int, typer.Option(help="Passes over the corpus.", min=1)]
LearningRate = Annotated[float, typer.Option(help="Peak of the learning rate.", min=0)]
BatchTokens = Annotated[int, typer.Option(help="Tokens per step.", min=1)]
Vocabulary = Annotated[
    int, typer.Option(help="Tokens that can be drafted: the most used ones.", min=16)
]
SoftShare = Annotated[
    float, typer.Option(help="Share of the target's distribution in the loss.", min=0, max=1)
]
Seed = Annotated[int, typer.Option(help="Decides order and dropout.", min=0, max=2**31 - 1)]
SaveMinutes = Annotated[float, typer.Option(help="Minutes between two saved states.", min=0)]
Precision = Annotated[str, typer.Option(help="Matrix products: auto, bf16 or fp32.")]
TrainingDevice = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
TrainingThreads = Annotated[
    int | None,
    typer.Option("--threads", help="CPU threads; default: one per physical core.", min=1),
]


@train_app.command()
def prompts(
    out: Annotated[Path, typer.Option(help="Prompt file to write.")],
    count: Annotated[int, typer.Option(help="Questions to begin; most are kept.", min=1)] = 1800,
    seed: Seed = 0,
    model: Model = DEFAULT_MODEL,
    threads: TrainingThreads = None,
) -> None:
    """Let the target write users' questions: chat, QA, summaries, translation, maths, code."""
    from specdec.drafters.training.collection import write_questions
    from specdec.drafters.training.collection_progress import collecting
    from specdec.drafters.training.prompts import openings, write_prompts
    from specdec.engine import Engine
    from specdec.errors import UsageError

    if out.exists():
        raise UsageError(f"{out} exists; take another name")
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"cannot write into {out.parent}")
    engine = Engine(_generating(model, threads))
    begun = openings(count, seed)
    num_written = sum(not opening.is_whole for opening in begun)
    with collecting("questions", num_written) as on_progress:
        written = write_questions(engine, begun, seed=seed, on_progress=on_progress)
    write_prompts(out, written)
    print(out)


@train_app.command()
def data(
    prompts: Annotated[list[Path], typer.Option(help="Prompt file; repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder of the corpus; one in it goes on.")],
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of the answers; repeatable; default: 0 and 1.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=8)] = 160,
    seed: Seed = 0,
    model: Model = DEFAULT_MODEL,
    threads: TrainingThreads = None,
) -> None:
    """Let the target answer prompt files; its answers and states are what drafters learn from."""
    from specdec.drafters.training.collection import CollectionPlan, collect
    from specdec.drafters.training.collection_progress import collecting
    from specdec.drafters.training.prompts import read_prompts
    from specdec.errors import UsageError

    asked = [prompt for file in prompts for prompt in read_prompts(file)]
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is not a folder; take another name")
    plan = CollectionPlan(asked, tuple(temperature or (0.0, 1.0)), max_tokens, seed=seed)
    with collecting("answers", plan.num_requests) as on_progress:
        collect(_generating(model, threads), plan, out, on_progress=on_progress)
    print(out)


@train_app.command()
def medusa(
    corpus: CorpusFolder,
    out: Out,
    heads: Annotated[int, typer.Option(help="Tokens guessed beyond the root.", min=1, max=32)] = 4,
    layers: Annotated[int, typer.Option(help="Residual layers of a head.", min=1, max=8)] = 1,
    epochs: Epochs = 4,
    learning_rate: LearningRate = 1e-3,
    batch_tokens: BatchTokens = 2048,
    vocabulary: Vocabulary = 8192,
    soft_share: SoftShare = 0.5,
    seed: Seed = 0,
    save_minutes: SaveMinutes = 5.0,
    precision: Precision = "auto",
    device: TrainingDevice = "cpu",
    threads: TrainingThreads = None,
    model: TargetName = None,
    as_json: AsJson = False,
) -> None:
    """Heads on the target's hidden state, each guessing one token further ahead."""
    from specdec.drafters.training.loop import LoopSettings
    from specdec.drafters.training.medusa_trainer import MedusaOptions, MedusaTrainer
    from specdec.drafters.training.workplace import Workplace

    options = MedusaOptions(heads, layers, soft_share)
    place = Workplace.open(
        corpus,
        model=model,
        vocabulary=vocabulary,
        precision=precision,
        device=device,
        threads=threads,
    )
    settings = LoopSettings(
        epochs=epochs, learning_rate=learning_rate, batch_tokens=batch_tokens, seed=seed
    )
    loop = place.loop(
        MedusaTrainer(place.target, place.projection, options),
        "medusa",
        options,
        settings,
        out,
        save_minutes,
    )
    _run(loop, place.describe(), as_json=as_json)


@train_app.command(name="small-model")
def small_model(
    corpus: CorpusFolder,
    out: Out,
    layers: Annotated[
        str, typer.Option(help="The target's layers to begin with, such as 0,-1; -1 is the last.")
    ] = "-1",
    intermediate_size: Annotated[
        int | None,
        typer.Option(help="Width of the feed-forward network; default: the target's.", min=1),
    ] = None,
    epochs: Epochs = 4,
    learning_rate: LearningRate = 5e-4,
    batch_tokens: BatchTokens = 4096,
    vocabulary: Vocabulary = 8192,
    soft_share: SoftShare = 0.5,
    seed: Seed = 0,
    save_minutes: SaveMinutes = 5.0,
    precision: Precision = "auto",
    device: TrainingDevice = "cpu",
    threads: TrainingThreads = None,
    model: TargetName = None,
    as_json: AsJson = False,
) -> None:
    """A decoder of one or a few layers with the target's own embedding and projection."""
    from specdec.drafters.training.loop import LoopSettings
    from specdec.drafters.training.small_model_trainer import SmallModelOptions, SmallModelTrainer
    from specdec.drafters.training.workplace import Workplace
    from specdec.errors import UsageError

    try:
        chosen = tuple(int(layer) for layer in layers.split(","))
    except ValueError:
        raise UsageError(f"--layers takes numbers such as 0,-1, not {layers!r}") from None
    options = SmallModelOptions(chosen, intermediate_size, soft_share)
    place = Workplace.open(
        corpus,
        model=model,
        vocabulary=vocabulary,
        precision=precision,
        device=device,
        threads=threads,
    )
    settings = LoopSettings(
        epochs=epochs, learning_rate=learning_rate, batch_tokens=batch_tokens, seed=seed
    )
    trainer = SmallModelTrainer(place.target, place.projection, options, seed)
    loop = place.loop(trainer, "small-model", options, settings, out, save_minutes)
    _run(loop, place.describe(), as_json=as_json)


def _generating(model: str, threads: int | None) -> EngineConfig:
    """Many streams at once, without drafts."""
    return EngineConfig(
        model=model,
        threads=threads,
        drafter="none",
        node_budget=0,
        max_running=48,
        max_model_len=2048,
        token_budget=128,
    )


def _run(loop: Any, description: Mapping[str, Any], *, as_json: bool) -> None:
    from specdec.drafters.training import curves
    from specdec.drafters.training.loop import Interrupted
    from specdec.drafters.training.progress import progress

    _say(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in description.items()))
    if loop.is_resumed:
        _say(f"going on at step {loop.position.step} of {loop.num_steps}")
    try:
        with interruption() as is_stopped, progress(loop.num_steps, loop.position.step) as report:
            metrics = loop.run(report, is_stopped=is_stopped)
    except Interrupted:
        _say(
            f"stopped at step {loop.position.step} of {loop.num_steps}; all of it is in {loop.out}:"
            " run the same command again to go on"
        )
        raise typer.Exit(130) from None
    if problem := curves.plot(loop.out):
        _say(problem)
    if as_json:
        seconds = round(loop.position.seconds, 1)
        print(json.dumps({"out": str(loop.out), "seconds": seconds, **description, **metrics}))
    else:
        print(loop.out)


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C makes the given function say True; the second one interrupts."""
    is_asked = False

    def ask(_signal: int, _frame: object) -> None:
        nonlocal is_asked
        is_asked = True
        signal.signal(signal.SIGINT, before)
        _say("stopping after this step; once more stops at once")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: is_asked
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
