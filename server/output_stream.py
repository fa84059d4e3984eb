"""OutputStream: what the engine brings for requests submitted together, for one reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from specdec.server.messages import Output


class OutputStream:
    """Outputs of the requests submitted together, in order of arrival, until each has finished.

    It holds at most one output per request: what is not fetched in time is merged, so a slow
    reader costs a bounded amount of memory and never holds the engine up. Always `close()` it:
    that aborts whatever is still running. `observe` is told of every output, `abort` of the ids to
    abort.

    Example: `async for output in stream: print(output.tokens)`.
    """

    def __init__(
        self,
        request_ids: Sequence[str],
        *,
        observe: Callable[[Output], object],
        abort: Callable[[str], object],
    ) -> None:
        self._observe, self._abort = observe, abort
        self._unfinished = set(request_ids)
        self._waiting: dict[str, Output] = {}
        self._arrival: asyncio.Future[None] | None = None  # cheaper than an Event, in every step

    def put(self, output: Output) -> None:
        """Take in news from the engine."""
        self._observe(output)
        waiting = self._waiting.get(output.request_id)
        if waiting is None:
            self._waiting[output.request_id] = output
        else:
            waiting.merge(output)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def fail(self, error: str, kind: str) -> None:
        """End every request that still runs with this error."""
        for request_id in self._unfinished:
            waiting = self._waiting.get(request_id)
            if waiting is None or waiting.finish_reason is None:
                self.put(Output(request_id, finish_reason="error", error=error, error_kind=kind))

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Output:
        if not self._unfinished:
            raise StopAsyncIteration
        while not self._waiting:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        output = self._waiting.pop(next(iter(self._waiting)))
        if output.finish_reason is not None:
            self._unfinished.discard(output.request_id)
        return output

    def close(self) -> None:
        """Abort what has not finished; safe to call at any time and more than once."""
        for request_id in self._unfinished:
            self._abort(request_id)
        self._unfinished.clear()
        self._waiting.clear()
