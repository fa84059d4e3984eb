"""Shadow: a share of finished requests, run again without speculation while nobody asks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from specdec.config import EngineConfig
from specdec.errors import EngineStopped, UsageError
from specdec.request import FinishReason
from specdec.server.divergence import Comparison
from specdec.server.messages import Output, Submit
from specdec.server.output_stream import OutputStream
from specdec.server.shadow_queue import Answered, ShadowQueue
from specdec.server.stderr_lines import say

LOOK_S = 0.05  # between two looks at whether the engine is idle
NUM_LOOKS = 4  # in a row that must find it so: who asks again at once is not to meet a shadow
MAX_TRIES = 3  # runs that requests interrupted

WHY_DROPPED = ("full", "interrupted", "failed")


class ShadowEngine(Protocol):
    """What is needed of an engine: `Supervisor` is one."""

    def submit(self, requests: Sequence[Submit]) -> OutputStream: ...
    def abort(self, request_id: str) -> None: ...


@dataclass
class _Following:
    """A request that was chosen and is being answered."""

    name: str
    submit: Submit
    seed: int | None = None
    output_ids: list[int] = field(default_factory=list)

    def answered(self, finish_reason: FinishReason) -> Answered:
        submit = self.submit
        return Answered(
            self.name,
            submit.prompt_ids,
            replace(submit.params, seed=self.seed),
            submit.cache_salt,
            tuple(self.output_ids),
            finish_reason,
        )


class Shadow:
    """Told of every request and output, it repeats a share of what ended with stop or length.

    One request runs at a time, and only while `is_idle()`; `interrupt` ends it at once, and it
    waits again. Where tokens differ it says so, in a line with ids and without text.
    `dropped` counts what was never compared, by why: the queue was full, requests came too often,
    or it could not be run. `num_tokens` are those that all runs brought.

    Example:
        shadow = Shadow(supervisor, 0.01, is_idle=lambda: True)
        shadow.begin(submits, "chatcmpl-1")
        shadow.take(output)    # every output, as it arrives
        shadow.interrupt()     # a request has come
    """

    def __init__(
        self,
        engine: ShadowEngine,
        share: float,
        *,
        is_idle: Callable[[], bool],
        queue: ShadowQueue | None = None,
        draw: Callable[[], float] = random.random,
        say: Callable[[str], None] = say,
    ) -> None:
        self.num_checked = self.num_divergences = self.num_tokens = 0
        self.dropped: Counter[str] = Counter()
        self._engine = engine
        self._share = share
        self._is_idle = is_idle
        self._queue = ShadowQueue() if queue is None else queue
        self._draw = draw
        self._say = say
        self._following: dict[str, _Following] = {}
        self._working: asyncio.Task[None] | None = None  # while requests wait
        self._num_idle = 0  # looks in a row
        self._num_runs = 0
        self._running: tuple[str, OutputStream] | None = None
        self._is_interrupted = False

    @property
    def num_waiting(self) -> int:
        """Requests to be run again."""
        return len(self._queue)

    def as_json(self) -> dict[str, Any]:
        """What it has found so far."""
        return {
            "checked": self.num_checked,
            "divergences": self.num_divergences,
            "dropped": {why: self.dropped[why] for why in WHY_DROPPED},
            "waiting": self.num_waiting,
        }

    def begin(self, submits: Sequence[Submit], shown_id: str) -> None:
        """Requests go to the engine, the choices of the answer that clients know by this id."""
        for index, submit in enumerate(submits):
            if self._draw() < self._share:
                name = f"{shown_id} choice {index}"
                self._following[submit.request_id] = _Following(name, submit)

    def take(self, output: Output) -> None:
        """An output has arrived from the engine, or an error in its place."""
        following = self._following.get(output.request_id)
        if following is None:
            return
        if output.seed is not None:
            following.seed = output.seed
        following.output_ids += [record.token_id for record in output.tokens]
        if output.finish_reason is None:
            return
        del self._following[output.request_id]
        if output.finish_reason in ("stop", "length"):
            self._wait(following.answered(output.finish_reason))

    def abort(self, request_id: str) -> None:
        """A request is over before its end; unknown ids are ignored."""
        self._following.pop(request_id, None)

    def interrupt(self) -> None:
        """A request has come: the engine drops what it repeats before it sees that request."""
        self._num_idle = 0
        if self._running is not None:
            request_id, stream = self._running
            self._running = None
            self._is_interrupted = True
            stream.fail("a request has come", EngineStopped.__name__)
            self._engine.abort(request_id)

    def _wait(self, answered: Answered) -> None:
        self.dropped["full"] += self._queue.add(answered)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())

    async def _work(self) -> None:
        """Run what waits until nothing does."""
        while self._queue:
            if self._num_idle < NUM_LOOKS or not self._is_idle():
                await asyncio.sleep(LOOK_S)
                self._num_idle = self._num_idle + 1 if self._is_idle() else 0
                continue
            answered = self._queue.take()
            last = await self._repeat(answered)
            if last is None:
                self.num_checked += 1
            elif self._is_interrupted:
                self._put_back(answered)
            else:
                self.dropped["failed"] += 1
                if last.error_kind == EngineStopped.__name__:  # it may be what ended the engine
                    self.dropped["failed"] += self._queue.clear()

    async def _repeat(self, answered: Answered) -> Output | None:
        """Run and compare; None, or the output that ended the run before that was done."""
        self._num_runs += 1
        request_id = f"shadow-{self._num_runs}"
        stream = self._engine.submit([answered.again(request_id)])
        self._running, self._is_interrupted = (request_id, stream), False
        comparison = Comparison(answered)
        try:
            async for output in stream:
                self.num_tokens += len(output.tokens)
                if divergence := comparison.take(output):
                    self.num_divergences += 1
                    self._say(divergence.line)
                    return None
                if output.finish_reason in ("abort", "error"):
                    return output
            return None
        finally:
            self._running = None
            stream.close()

    def _put_back(self, answered: Answered) -> None:
        num_tries = answered.num_tries + 1
        if num_tries == MAX_TRIES:
            self.dropped["interrupted"] += 1
        else:
            self.dropped["full"] += self._queue.add(replace(answered, num_tries=num_tries))


def check_shadow(share: float, config: EngineConfig) -> None:
    """Raise UsageError where running again without speculation need not give the same tokens.

    Example: `check_shadow(0.01, EngineConfig(verification="typical"))` raises.
    """
    if share and config.verification != "coupled":
        raise UsageError(
            f"--shadow compares tokens, and --verification {config.verification} does not promise "
            "equal ones; use --verification coupled, or leave --shadow out"
        )
