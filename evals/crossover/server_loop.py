"""ServerLoop: a closed loop of clients of one OpenAI-compatible server, vLLM's for one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from specdec.errors import SpecdecError
from specdec.evals.client.endpoint import Endpoint
from specdec.evals.client.exchange import Exchange
from specdec.evals.crossover.loop_run import LoopRun
from specdec.evals.crossover.steady_state import SteadyState
from specdec.evals.crossover.workloads import Task
from specdec.evals.latency.server_peer import ServerPeer


class ServerLoop(ServerPeer):
    """A server asked by many clients at once, each of which asks again as soon as it is answered.

    `owner` is who the server says that it is, `version` which of its versions; "" of one that does
    not tell. Raises UsageError like ServerPeer.

    Example: `ServerLoop("http://127.0.0.1:8000").run(tasks, concurrency=8, num_requests=24)`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.owner, self.version = asyncio.run(self._who())

    async def _who(self) -> tuple[str, str]:
        owner = version = ""
        async with Endpoint(self._url) as endpoint:
            found: Any = await endpoint.get_json("/v1/models")
            with suppress(LookupError, TypeError):
                owner = str(found["data"][0]["owned_by"])
            with suppress(SpecdecError, LookupError, TypeError):
                version = str((await endpoint.get_json("/version"))["version"])
        return owner, version

    def run(self, tasks: Sequence[Task], concurrency: int, num_requests: int) -> LoopRun:
        """As `ClosedLoop.run`, but that the streams at the end are read to theirs.

        Raises SpecdecError for an answer that is none, or of another length.
        """
        exchanges = asyncio.run(self._exchanges(tasks, concurrency, num_requests))
        return replayed(exchanges, concurrency, num_requests)

    async def _exchanges(
        self, tasks: Sequence[Task], concurrency: int, num_requests: int
    ) -> dict[int, Exchange]:
        """All that was asked, by number."""
        exchanges: dict[int, Exchange] = {}
        num_begun, num_left = 0, num_requests

        async def client() -> None:
            nonlocal num_begun, num_left
            while num_left:
                number, num_begun = num_begun, num_begun + 1
                question = tasks[number % len(tasks)].question
                found = await self._ask(endpoint, question)
                if found.num_output != question.num_tokens:
                    raise SpecdecError(
                        f"{self._name} answered with {found.num_output} tokens instead of "
                        f"{question.num_tokens}: it cannot be compared"
                    )
                exchanges[number] = found
                num_left -= number < num_requests

        async with Endpoint(self._url) as endpoint:
            await asyncio.gather(*(client() for _ in range(concurrency)))
        return exchanges


def replayed(exchanges: dict[int, Exchange], concurrency: int, num_requests: int) -> LoopRun:
    """The steady state of what clients noted, told over again in the order of its arrivals."""
    state = SteadyState(concurrency, num_requests)
    events = sorted(
        (at, number, num_tokens, is_last)
        for number, exchange in exchanges.items()
        for at, num_tokens, is_last in _arrivals(exchange)
    )
    for at, number, num_tokens, is_last in events:
        state.note(number, num_tokens, at, is_last=is_last)
    return state.run([exchanges[number].token_ids for number in range(num_requests)])


def _arrivals(exchange: Exchange) -> Iterator[tuple[float, int, bool]]:
    """When how many tokens came, and whether they were the last.

    Where the server did not count as it went, each arrival stands for as many.
    """
    arrivals = exchange.arrivals
    each = exchange.num_output / max(1, len(arrivals))
    is_told = all(arrival.num_tokens is not None for arrival in arrivals)
    for index, arrival in enumerate(arrivals):
        evenly = round(each * (index + 1)) - round(each * index)
        num_tokens = (arrival.num_tokens or 0) if is_told else evenly
        yield exchange.sent_at + arrival.at_s, num_tokens, index == len(arrivals) - 1
