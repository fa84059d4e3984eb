"""Virtual time: an event loop whose clock jumps to what comes next, and servers that obey it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from specdec.evals.client.exchange import Arrival, Exchange, Outcome
from specdec.evals.load.loops import Send

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waiting takes no time but on its own clock, which begins at 0."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumps(self))

    def time(self) -> float:
        return self.now


class _Jumps(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits for something that never comes"
        self._loop.now += max(0.0, timeout)
        return super().select(0)


def run_virtually(work: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """What `work` gives on a loop of virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(work(loop))


def exchange(
    *arrivals: tuple[float, int | None],
    sent_at: float = 0.0,
    end_s: float | None = None,
    outcome: Outcome = "ok",
    **more: Any,
) -> Exchange:
    """An exchange with arrivals of so many tokens at those times; it ends with the last."""
    found = tuple(Arrival(at, number) for at, number in arrivals)
    num_output = sum(number or 0 for _, number in arrivals)
    return Exchange(
        sent_at=sent_at,
        end_s=end_s if end_s is not None else (arrivals[-1][0] if arrivals else 0.0),
        outcome=outcome,
        arrivals=found,
        **{"num_output": num_output, "num_prompt": 10, **more},
    )


def server_of(
    loop: VirtualLoop, answers: Sequence[tuple[float, float]], outcomes: Sequence[Outcome] = ()
) -> Send:
    """The index-th answer has a first token after so many seconds and two more after as many."""

    async def send(index: int) -> Exchange:
        sent_at = loop.time()
        outcome = outcomes[index % len(outcomes)] if outcomes else "ok"
        if outcome != "ok":
            return exchange(sent_at=sent_at, outcome=outcome, error="no", num_prompt=0)
        first_s, rest_s = answers[index % len(answers)]
        await asyncio.sleep(first_s)
        first_s = loop.time() - sent_at
        await asyncio.sleep(rest_s)
        return exchange((first_s, 1), (loop.time() - sent_at, 2), sent_at=sent_at)

    return send
