"""Timer: something to be done later unless it is stopped before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVarTuple, Unpack

Arguments = TypeVarTuple("Arguments")


class Timer:
    """Runs at most once for each start; starting one that runs changes nothing.

    Example: `timer.start(5.0, transport.abort)`, then `timer.stop()` if all went well.
    """

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(
        self, seconds: float, do: Callable[[Unpack[Arguments]], object], *args: *Arguments
    ) -> None:
        """Do it in so many seconds, at once where they are not above 0."""
        if self._handle is None:
            loop = asyncio.get_running_loop()
            self._handle = loop.call_later(seconds, self._run, lambda: do(*args))

    def stop(self) -> None:
        """Do nothing after all; safe at any time."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _run(self, do: Callable[[], object]) -> None:
        self._handle = None
        do()
