"""Progress: how far a long measurement has come, on stderr, as a bar if rich is there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

PLAIN_SECONDS = 10.0  # between two lines where there is no bar

Advance = Callable[[str], None]


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """Gives a function to call with the name of each of `total` items when it begins."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield _lines(total)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=total)
        num_begun = 0

        def advance(name: str) -> None:
            nonlocal num_begun
            bar.update(task, completed=num_begun, description=escape(name))
            num_begun += 1

        yield advance


def _lines(total: int) -> Advance:
    """A line per item with the time left, but not more than one in PLAIN_SECONDS."""
    num_begun = 0
    started = last = time.monotonic()

    def advance(name: str) -> None:
        nonlocal num_begun, last
        num_begun += 1
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            num_done = num_begun - 1
            left = f"; {_left(last - started, num_done, total)} left" if num_done else ""
            print(f"{num_begun}/{total}: {name}{left}", file=sys.stderr, flush=True)

    return advance


def _left(seconds: float, num_done: int, total: int) -> str:
    return duration(seconds / num_done * (total - num_done))


def duration(seconds: float) -> str:
    """Example: `duration(200) == "3 min"`."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
