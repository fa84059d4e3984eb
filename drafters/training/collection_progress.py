"""CollectionProgress: how far a collection is, on stderr, as a bar on a terminal, else as lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from specdec.drafters.training.collection import OnProgress

PLAIN_SECONDS = 15.0  # between two lines where there is no bar


@contextmanager
def collecting(what: str, total: int) -> Iterator[OnProgress]:
    """Gives a function to call with the requests done, of `total`, and the tokens written."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield _lines(what, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.completed}/{task.total} {task.description}"),
        BarColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, tokens=0)
        yield lambda done, tokens: bar.update(task, completed=done, tokens=tokens)


def _lines(what: str, total: int) -> OnProgress:
    last = time.monotonic()

    def say(done: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            print(f"{done}/{total} {what}, {tokens:,} tokens", file=sys.stderr, flush=True)

    return say
