"""EngineTotals: what the engine has counted, asked for when somebody looks, across restarts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Protocol

from specdec.errors import SpecdecError
from specdec.server.load_metrics import LATELY_S

SPACING_S = 0.5  # between the answers that are kept to tell what happened lately

Facts = dict[str, Any]  # Engine.count's


class CountingEngine(Protocol):
    """What is needed of an engine: `Supervisor` is one."""

    @property
    def num_restarts(self) -> int: ...
    async def count(self) -> Facts: ...


class EngineTotals:
    """Keeps the engine's last answer, and the sums of the engines that it replaced.

    `totals` never fall: a new engine's counts are added to the last known ones of those before
    it. What an engine did between its last answer and its end is not known. `now` is empty and
    `is_up` is false while the engine does not answer: it is loading, gone, or in a long step.

    Example:
        totals = EngineTotals(supervisor)
        await totals.refresh()
        totals.totals["num_steps"]
    """

    def __init__(self, engine: CountingEngine) -> None:
        self.engine = engine
        self.is_up = False
        self.now: dict[str, int] = {}
        self.totals: Facts = {}
        self._instance: str | None = None
        self._past: Facts = {}
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")
        self._history: deque[tuple[float, Facts]] = deque()

    async def refresh(self) -> None:
        """Ask the engine; never raises for its silence, and takes twice its patience at most.

        Whoever comes while a question is out shares the next one with all others who do.
        """
        came_at = time.monotonic()
        async with self._asking:
            if self._asked_at >= came_at:
                return
            self._asked_at = time.monotonic()
            try:
                self._take(await self.engine.count())
            except SpecdecError:
                self.is_up, self.now = False, {}

    def lately(self, *names: str) -> float | None:
        """What a number among the totals grew by within the last ten seconds, as far as known.

        None before two answers lie within that time. Example: `totals.lately("step_s", "sum")`.
        """
        if self._history[0][1] is self.totals:
            return None
        return _find(self.totals, names) - _find(self._history[0][1], names)

    def _take(self, facts: Facts) -> None:
        if facts["instance"] != self._instance:
            self._instance, self._past = facts["instance"], self.totals
        self.totals = added(self._past, facts["totals"])
        self.now, self.is_up = facts["now"], True
        now = time.monotonic()
        while self._history and self._history[0][0] < now - LATELY_S:
            self._history.popleft()
        if not self._history or now - self._history[-1][0] >= SPACING_S:
            self._history.append((now, self.totals))


def _find(totals: Facts, names: Sequence[str]) -> float:
    found: Any = totals
    for name in names:
        found = found[name]
    return float(found)


def added(left: Any, right: Any) -> Any:
    """The sum of two alike nests of dicts, lists and numbers; what one lacks counts nothing.

    Example: `added({"a": [1], "b": 2}, {"a": [1, 1]})` is {"a": [2, 1], "b": 2}.
    """
    if isinstance(left, dict):
        names = [*left, *(name for name in right if name not in left)]
        return {
            name: added(left[name], right[name])
            if name in left and name in right
            else left.get(name, right.get(name))
            for name in names
        }
    if isinstance(left, list):
        return [added(a, b) for a, b in zip_longest(left, right, fillvalue=0)]
    return left + right
