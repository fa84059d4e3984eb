"""The command line: generate, serve, pull, info, train, bench, eval, sim, kernels."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from specdec.config import DEFAULT_MODEL, EngineConfig
from specdec.drafters.training.commands import train_app
from specdec.errors import SpecdecError, UsageError
from specdec.evals.batching.command import sim_app
from specdec.evals.bench_commands import bench_app
from specdec.evals.eval_commands import eval_app, kernels_app
from specdec.options import AsJson, engine_options, need_command
from specdec.server.serve_command import serve

app = typer.Typer(
    name="specdec",
    help="Low-latency LLM server with speculative decoding that never changes the answer.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench")
app.add_typer(eval_app, name="eval")
app.add_typer(kernels_app, name="kernels")
app.add_typer(sim_app, name="sim")
app.add_typer(train_app, name="train")
app.command()(serve)


def main() -> None:
    """Run the command line; every error a user can meet is one line and an exit code."""
    _open_closed_streams()
    try:
        exit_code = app(prog_name="specdec", standalone_mode=False)
        sys.stdout.flush()  # here, where a closed pipe is still an error to catch
        sys.exit(exit_code)
    except SpecdecError as error:
        _fail(str(error), error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except typer.Abort:
        _fail("interrupted", 130)
    except typer.TyperException as error:
        _fail(error.format_message(), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        _fail(f"cannot write: {error.strerror or error}", 1)


def _open_closed_streams() -> None:
    """A stream that was closed goes nowhere: its number must not become some file's or socket's."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free, which is its own
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def _fail(message: str, exit_code: int) -> NoReturn:
    print(f"specdec: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(exit_code)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"specdec {version('specdec-server')}")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    is_version_asked: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    need_command(context)


@app.command()
@engine_options(but=("max_running",))
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text, or - for standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    messages: Annotated[
        Path | None, typer.Option(help="JSON file of chat messages, - for standard input.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the prompt; no chat template.")] = False,
    prediction: Annotated[
        Path | None,
        typer.Option(help="File with the text expected back, for the drafter prediction."),
    ] = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    min_tokens: int = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")] = None,
    ignore_eos: bool = False,
    seed: int | None = None,
    logprobs: Annotated[int | None, typer.Option(help="Top log-probabilities to print.")] = None,
    *,
    config: EngineConfig,
    as_json: AsJson = False,
) -> None:
    """Generate from a prompt or chat messages; accepted draft tokens are shown in green."""
    from specdec.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        seed=seed,
        logprobs=logprobs,
    )
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs needs --json")
    if str(prediction) == "-" and "-" in (prompt, str(file), str(messages)):
        raise UsageError("standard input is either the prompt or the prediction")
    chat = _chat(prompt, file, messages, system, raw)
    predicted = "" if prediction is None else _read(prediction)

    from specdec.engine import Engine
    from specdec.generation import generate as run
    from specdec.terminal import TokenPrinter

    engine = Engine(config)
    if predicted and "prediction" not in engine.config.drafter:
        print("specdec: --prediction is of no use without --drafter prediction", file=sys.stderr)
    tokenizer = engine.tokenizer
    prompt_ids = tokenizer.encode(chat) if isinstance(chat, str) else tokenizer.encode_chat(chat)
    printer = None if as_json else TokenPrinter(sys.stdout)
    prediction_ids = tokenizer.encode(predicted, add_special_tokens=False)
    result = run(engine, prompt_ids, params, prediction_ids=prediction_ids, on_delta=printer)
    if printer is None:
        print(json.dumps({**result.as_json(), "chosen": engine.reason}, ensure_ascii=False))
    else:
        printer.close(result)
        if engine.reason:
            print(f"chosen: {engine.reason}", file=sys.stderr)
    engine.close()


def _chat(
    prompt: str | None, file: Path | None, messages: Path | None, system: str | None, raw: bool
) -> str | list[dict[str, Any]]:
    """The text to continue, or the chat messages; exactly one source."""
    if sum(source is not None for source in (prompt, file, messages)) != 1:
        raise UsageError("give one of: a prompt, --file FILE, --messages FILE")
    if messages is not None:
        if raw or system is not None:
            raise UsageError("--messages goes with neither --raw nor --system")
        return _parse_messages(_read(messages))
    text = prompt if prompt not in (None, "-") else _read(file or Path("-"))
    if not text:
        raise UsageError("the prompt is empty")
    if raw:
        if system is not None:
            raise UsageError("--system needs the chat template; leave out --raw")
        return text
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": text}]


def _parse_messages(text: str) -> list[dict[str, Any]]:
    try:
        chat = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--messages is not valid JSON: {error}") from None
    is_chat = (
        isinstance(chat, list)
        and chat
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in chat
        )
    )
    if not is_chat:
        raise UsageError('--messages must be a list like [{"role": "user", "content": "Hi"}]')
    return list(chat)


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None


@app.command()
def pull(
    name: Annotated[
        str, typer.Argument(help="Built-in name, hub id or local folder.")
    ] = DEFAULT_MODEL,
) -> None:
    """Fetch a model and check it; the last line is its folder."""
    from specdec import checkpoints

    folder = checkpoints.resolve(name)
    checkpoints.verify(folder)
    print(folder)


@app.command()
def info(
    as_json: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show what a running server decides, until Ctrl-C.")
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="The server to watch; default: http://127.0.0.1:8000.")
    ] = None,
    interval: Annotated[
        float | None, typer.Option(help="Seconds between two looks at it; default: 1.")
    ] = None,
) -> None:
    """Print devices, dtypes, drafters and versions, or watch a server speculate."""
    if watch:
        from specdec.server.watch import DEFAULT_URL
        from specdec.server.watch import watch as run

        run(url or DEFAULT_URL, interval_s=1.0 if interval is None else interval, as_json=as_json)
        return
    if url is not None or interval is not None:
        raise UsageError("--url and --interval need --watch")

    from specdec.info import collect, render

    facts = collect()
    print(json.dumps(facts) if as_json else render(facts))


if __name__ == "__main__":
    main()
