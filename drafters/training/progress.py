"""TrainingProgress: how far a training is, on stderr, as a bar on a terminal, else as lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from specdec.drafters.training import acceptance
from specdec.drafters.training.loop import Report

PLAIN_SECONDS = 15.0  # between two lines where there is no bar


@contextmanager
def progress(total: int, done: int) -> Iterator[Report]:
    """A report for a training of `total` steps, of which `done` were done before."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.completed}/{task.total} steps"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, bar.add_task("", total=total, completed=done, loss=0.0, rate=0.0))


class _Bar:
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def step(self, done: int, total: int, loss: float, rate: float) -> None:
        self._bar.update(self._task, completed=done, total=total, loss=loss, rate=rate)

    def epoch(self, number: int, metrics: Mapping[str, Any]) -> None:
        self._bar.console.print(_text(number, metrics), highlight=False)


class _Lines:
    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._first: int | None = None

    def step(self, done: int, total: int, loss: float, rate: float) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = done - 1
        if now - self._last >= PLAIN_SECONDS or done == total:
            self._last = now
            left = (now - self._began) / max(1, done - self._first) * (total - done)
            print(
                f"{done}/{total} steps, loss {loss:.4f}, {rate:,.0f} tokens/s, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def epoch(self, number: int, metrics: Mapping[str, Any]) -> None:
        print(_text(number, metrics), file=sys.stderr, flush=True)


def _text(number: int, metrics: Mapping[str, Any]) -> str:
    return f"epoch {number}, held-out:\n{acceptance.render(metrics)}"
