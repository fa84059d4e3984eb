"""Level: how much load there is at a time: so many streams, or so many requests per second."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.errors import UsageError


@dataclass(frozen=True)
class Level:
    """A closed loop of `concurrency` clients, or an open one that sends `rate` requests per second.

    Example: `Level(concurrency=8).name` is "concurrency-8", `Level(rate=0.5).load` is 0.5.
    """

    concurrency: int | None = None
    rate: float | None = None

    @property
    def is_closed(self) -> bool:
        """Whether a client waits for its answer before it asks again."""
        return self.concurrency is not None

    @property
    def load(self) -> float:
        """Clients, or requests per second."""
        return float(self.concurrency if self.concurrency is not None else self.rate or 0)

    @property
    def name(self) -> str:
        """Of the level's file."""
        return f"{'concurrency' if self.is_closed else 'rate'}-{self.load:g}"


def parse_levels(concurrency: str | None, rate: str | None) -> tuple[Level, ...]:
    """Levels in rising order, of one of two comma lists.

    Example: `parse_levels(None, "0.5,2")`. Raises UsageError for both lists, or for no numbers.
    """
    if concurrency is not None and rate is not None:
        raise UsageError("choose --concurrency (closed loop) or --rate (open loop), one per run")
    if rate is not None:
        loads = _numbers(rate, "--rate")
        return tuple(Level(rate=load) for load in loads)
    loads = _numbers(concurrency or "1,2,4,8", "--concurrency")
    if not all(load.is_integer() for load in loads):
        raise UsageError(f"--concurrency takes whole numbers of clients, not {concurrency!r}")
    return tuple(Level(concurrency=int(load)) for load in loads)


def _numbers(text: str, option: str) -> list[float]:
    try:
        numbers = {float(part) for part in text.split(",")}
    except ValueError:
        numbers = set()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise UsageError(f"{option} takes numbers above 0 with commas between, not {text!r}")
    return sorted(numbers)
