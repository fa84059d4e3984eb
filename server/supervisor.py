"""Supervisor: the engine of a server's whole life, however often its process has to be started."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.config import EngineConfig
from specdec.errors import EngineStopped, SpecdecError
from specdec.server.engine_client import (
    COUNT_WAIT_S,
    ENGINE_COMMAND,
    EXPLAIN_WAIT_S,
    EngineClient,
    Observer,
)
from specdec.server.messages import Ready, Submit
from specdec.server.output_stream import OutputStream
from specdec.server.stderr_lines import say
from specdec.server.suspects import Suspects


@dataclass(frozen=True)
class BackOff:
    """Seconds to wait before the engine is started again; none the first time.

    After `calm_s` seconds of serving the next end counts as the first again.
    """

    first_s: float = 0.5
    longest_s: float = 30.0
    calm_s: float = 60.0

    def delay_s(self, num_ends: int) -> float:
        """The delay after so many ends in a row.

        Example: 1, 2, 3, 4 ends wait 0, 0.5, 1, 2 s, and 9 or more 30 s.
        """
        if num_ends <= 1:
            return 0.0
        return float(min(self.first_s * 2.0 ** min(num_ends - 2, 60), self.longest_s))


class Supervisor:
    """Starts the engine process and starts it again whenever it ends; EngineClient for ever.

    An engine that ends takes its requests with it: they end with an error, and clients send them
    again if they like. Those that end it twice are refused (Suspects). An engine that cannot start
    the first time is not tried again: `wait_ready` raises why.

    Example:
        engine = Supervisor(hang_s=5.0)
        await engine.start(config)
        await engine.wait_ready()
        stream = engine.submit([Submit("r-0", (1, 2), SamplingParams())])
    """

    def __init__(
        self,
        command: Sequence[str] = ENGINE_COMMAND,
        *,
        hang_s: float = 0.0,
        back_off: BackOff = BackOff(),
        say: Callable[[str], None] = say,
    ) -> None:
        self._command = command
        self._hang_s = hang_s
        self._back_off = back_off
        self._say = say
        self._suspects = Suspects()
        self._observer: Observer | None = None
        self._failure: SpecdecError | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._engine = self._make_engine()
        self.num_restarts = 0

    async def start(self, config: EngineConfig, *, is_tested: bool = False) -> None:
        """Start the engine process, and keep one running from now on.

        With `is_tested` the first one measures its speed before it is ready.
        """
        assert self._keeping is None, "a Supervisor is started once"
        await self._engine.start(config, is_tested=is_tested)
        self._keeping = asyncio.create_task(self._keep(config))

    async def wait_ready(self) -> Ready:
        """The engine's description; raises the error that kept it from starting."""
        return await self._engine.wait_ready()

    @property
    def ready(self) -> Ready | None:
        """The engine's description, once it has started."""
        return self._engine.ready

    @property
    def is_idle(self) -> bool:
        """Whether the engine has started and has nothing to do."""
        return self._engine.is_idle

    @property
    def failure(self) -> SpecdecError | None:
        """Why the engine ended last, if it ever has."""
        return self._failure or self._engine.failure

    @property
    def observer(self) -> Observer | None:
        """Who counts what becomes of requests, of this engine and of those to come."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = self._engine.observer = observer

    def check_ready(self) -> Ready:
        """The engine's description; raises EngineStopped while it cannot take requests."""
        try:
            return self._engine.check_ready()
        except EngineStopped:
            if self.failure is None:
                raise
            raise EngineStopped(f"{self.failure}; it is starting again") from None

    def submit(self, requests: Sequence[Submit]) -> OutputStream:
        """Run requests and return the stream of their outputs, the first one empty for each.

        Raises EngineStopped when the engine is not ready or the requests have to wait for others,
        InvalidRequest when they ended the engine twice. No client sends shadows again, so those
        are no suspects.
        """
        self.check_ready()
        if not any(request.is_shadow for request in requests):
            self._suspects.admit(requests)
        return self._engine.submit(requests)

    def abort(self, request_id: str) -> None:
        """Stop a request and drop what it still brings; unknown ids are ignored."""
        self._engine.abort(request_id)

    async def explain(
        self, max_decisions: int, *, wait_s: float = EXPLAIN_WAIT_S
    ) -> dict[str, Any]:
        """See EngineClient."""
        self.check_ready()
        return await self._engine.explain(max_decisions, wait_s=wait_s)

    async def count(self, *, wait_s: float = COUNT_WAIT_S) -> dict[str, Any]:
        """See EngineClient."""
        self.check_ready()
        return await self._engine.count(wait_s=wait_s)

    def fail_streams(self, error: str) -> None:
        """End every running request with an error, as at the end of a shutdown's grace."""
        self._engine.fail_streams(error)

    async def shutdown(self) -> None:
        """End the engine process for good and wait for it."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._engine.shutdown()

    def _make_engine(self) -> EngineClient:
        return EngineClient(self._command, hang_s=self._hang_s, on_finish=self._suspects.finish)

    async def _keep(self, config: EngineConfig) -> None:
        """Start a new engine process whenever one has ended."""
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(SpecdecError):
            await self._engine.wait_ready()
        if self._engine.ready is None:
            return
        num_ends, ready_at = 0, clock()
        while True:
            await self._engine.stopped.wait()
            ended_at = clock()
            self._suspects.blame()
            self._failure = self._engine.failure
            is_calm = (
                self._engine.ready is not None and ended_at - ready_at >= self._back_off.calm_s
            )
            num_ends = 1 if is_calm else num_ends + 1
            delay_s = self._back_off.delay_s(num_ends)
            soon = f" in {delay_s:g} s" if delay_s else ""
            self._say(f"error: {self._failure}; starting it again{soon}")
            await asyncio.sleep(delay_s)
            self._engine = self._make_engine()
            self._engine.observer = self._observer
            await self._engine.start(config)
            with contextlib.suppress(SpecdecError):
                await self._engine.wait_ready()
                ready_at = clock()
                self.num_restarts += 1
                self._say(f"ready again after {ready_at - ended_at:.1f} s")
