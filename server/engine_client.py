"""EngineClient: the server's end of one engine process, from its start to its end, for asyncio."""

from __future__ import annotations

import asyncio
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from specdec.config import EngineConfig
from specdec.errors import EngineStopped, SpecdecError
from specdec.server.child_process import ChildProcess
from specdec.server.frame_reader import FrameReader
from specdec.server.framing import encode_frame
from specdec.server.messages import (
    Abort,
    Alive,
    Count,
    Explain,
    Explanation,
    Failed,
    Output,
    Ping,
    Ready,
    Shutdown,
    Start,
    Submit,
    ToEngine,
    Tokens,
    ToServer,
    decode_to_server,
    revive_error,
)
from specdec.server.output_stream import OutputStream

ENGINE_COMMAND = (sys.executable, "-m", "specdec.server.engine_process")
EXIT_WAIT_S = 5.0  # how long a child may take to end before it is killed
EXPLAIN_WAIT_S = 5.0  # a step, after which the engine answers, is usually a hundredth of that
COUNT_WAIT_S = 0.4  # who scrapes waits a second or so
LOOK_S = 0.25  # between two looks at whether the child lives
NUM_LOOKS = 20  # at least, before silence counts as hanging


class Observer(Protocol):
    """Who counts what becomes of requests."""

    def take(self, output: Output) -> None: ...
    def abort(self, request_id: str) -> None: ...


class EngineClient:
    """Starts the engine process, submits requests to it and notices when it dies or hangs.

    It hangs when it gives no sign of life for `hang_s` seconds, or, while it has work, for the
    longest step that it may take if that is more; it is killed then. With 0 it never hangs, nor
    does it while it loads.
    `on_finish` is told the last output of every request that the engine was given.

    Example:
        client = EngineClient()
        await client.start(config)
        ready = await client.wait_ready()
        stream = client.submit([Submit("r-0", (1, 2), SamplingParams())])
    """

    def __init__(
        self,
        command: Sequence[str] = ENGINE_COMMAND,
        *,
        hang_s: float = 0.0,
        on_finish: Callable[[Output], object] = lambda output: None,
    ) -> None:
        self._command = command
        self._hang_s = hang_s
        self._on_finish = on_finish
        self._streams: dict[str, OutputStream] = {}
        self._unfinished: set[str] = set()  # what the engine has been given, aborted or not
        self._questions: dict[int, asyncio.Future[Explanation]] = {}
        self._num_questions = 0
        self.observer: Observer | None = None
        self._process: ChildProcess | None = None
        self._frames = FrameReader(self._take)
        self._life: asyncio.Task[None] | None = None
        self._ready: Ready | None = None
        self._settled = asyncio.Event()  # ready or stopped
        self._failure: SpecdecError | None = None
        self._is_connected = False
        self._num_received = 0
        self._is_pinged = False
        self.stopped = asyncio.Event()

    async def start(self, config: EngineConfig, *, is_tested: bool = False) -> None:
        """Start the engine process; its model loads while this server goes on.

        Where the system has no room for one, this client is stopped and says so.
        """
        assert self._process is None, "an EngineClient starts one engine"
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: self._frames, sock=ours)
                self._process = ChildProcess(self._command, theirs.fileno())
        except OSError as error:
            self._frames.close()
            self._end(f"the engine process cannot be started: {error.strerror or error}".lower())
            return
        self._is_connected = True
        self._life = asyncio.create_task(self._live(self._process))
        self._send(Start(config, is_tested))

    async def wait_ready(self) -> Ready:
        """The engine's description; raises the error that kept it from starting."""
        await self._settled.wait()
        if self._ready is None:
            raise self._failure or EngineStopped("the engine process ended while starting")
        return self._ready

    @property
    def ready(self) -> Ready | None:
        """The engine's description, once it has started."""
        return self._ready

    @property
    def failure(self) -> SpecdecError | None:
        """Why the engine stopped, once it has."""
        return self._failure

    @property
    def is_idle(self) -> bool:
        """Whether the engine has started and has nothing to do."""
        return self._ready is not None and self._is_connected and not self._unfinished

    def check_ready(self) -> Ready:
        """The engine's description; raises EngineStopped while it cannot take requests."""
        if self.stopped.is_set():
            raise EngineStopped(str(self._failure))
        if self._ready is not None and not self._is_connected:
            raise EngineStopped(str(self._failure or "the engine process has ended"))
        if self._ready is None:
            raise EngineStopped("the model is loading")
        return self._ready

    def submit(self, requests: Sequence[Submit]) -> OutputStream:
        """Run requests and return the stream of their outputs, the first one empty for each.

        Raises EngineStopped when the engine is not ready.
        """
        self.check_ready()
        ids = [request.request_id for request in requests]
        stream = OutputStream(ids, observe=self._observe, abort=self.abort)
        for request in requests:
            assert request.request_id not in self._streams, f"{request.request_id} runs already"
            self._streams[request.request_id] = stream
            self._unfinished.add(request.request_id)
            self._send(request)
        return stream

    def abort(self, request_id: str) -> None:
        """Stop a request and drop what it still brings; unknown ids are ignored."""
        if self._streams.pop(request_id, None) is not None and self._is_connected:
            self._send(Abort(request_id))
        if self.observer is not None:
            self.observer.abort(request_id)

    async def explain(
        self, max_decisions: int, *, wait_s: float = EXPLAIN_WAIT_S
    ) -> dict[str, Any]:
        """What the controller decides and why, as JSON, asked of the engine between two steps.

        Raises EngineStopped when the engine is not ready, stops, or takes longer than `wait_s`
        seconds; SpecdecError when it cannot say.
        Example: `(await client.explain(5))["decisions"][-1]["reason"]`.
        """
        return await self._ask(lambda question_id: Explain(question_id, max_decisions), wait_s)

    async def count(self, *, wait_s: float = COUNT_WAIT_S) -> dict[str, Any]:
        """What the engine has counted, `Engine.count()`; raises as `explain` does."""
        return await self._ask(Count, wait_s)

    async def _ask(self, ask: Callable[[int], ToEngine], wait_s: float) -> dict[str, Any]:
        self.check_ready()
        self._num_questions += 1
        question_id = self._num_questions
        answer: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        self._questions[question_id] = answer
        try:
            self._send(ask(question_id))
            explanation = await asyncio.wait_for(answer, wait_s)
        except TimeoutError:
            raise EngineStopped(
                f"the engine has been in one step for {wait_s:g} s; ask again later"
            ) from None
        finally:
            del self._questions[question_id]
        if explanation.error is not None:
            raise SpecdecError(explanation.error)
        return explanation.facts

    def fail_streams(self, error: str) -> None:
        """End every running request with an error, as at the end of a shutdown's grace."""
        for request_id, stream in list(self._streams.items()):
            stream.fail(error, EngineStopped.__name__)
            self.abort(request_id)

    async def shutdown(self) -> None:
        """End the engine process and wait for it; it is killed if it does not end in time."""
        if self._life is None or self._process is None:
            return
        self._failure = self._failure or EngineStopped("the server is shutting down")
        if self._ready is None:
            self._process.terminate()  # it is loading and does not listen
        elif self._is_connected:
            self._send(Shutdown())
        try:
            await asyncio.wait_for(asyncio.shield(self._life), EXIT_WAIT_S)
        except TimeoutError:
            self._process.kill()
            await self._life

    def _send(self, message: ToEngine) -> None:
        # Not drained: what a request may weigh is bounded, and the engine reads every step.
        self._frames.write(encode_frame(message))

    def _observe(self, output: Output) -> None:
        if self.observer is not None:
            self.observer.take(output)

    async def _live(self, process: ChildProcess) -> None:
        """Wait until the engine is gone or hangs; then end what is left."""
        reading = asyncio.create_task(self._frames.ended.wait())
        watching = asyncio.create_task(self._watch(process))
        await asyncio.wait((reading, watching), return_when=asyncio.FIRST_COMPLETED)
        has_left = reading.done()
        for task in (reading, watching):
            task.cancel()
        await asyncio.gather(reading, watching, return_exceptions=True)
        self._is_connected = False
        self._frames.close()
        if (error := self._frames.error) is not None:
            traceback.print_exception(error)
            self._failure = EngineStopped(f"the engine process sent what cannot be read: {error}")
            process.kill()
        if self._failure is not None:
            self._fail_all()  # whoever waits need not wait for the exit as well
        how = await process.ended(EXIT_WAIT_S if has_left else 0.0)
        self._end(f"the engine process {how}")

    def _take(self, body: bytes) -> None:
        self._receive(decode_to_server(body))

    async def _watch(self, process: ChildProcess) -> None:
        """Return once the process has ended or hangs. Where it is silent it is asked to answer."""
        look_s = min(LOOK_S, self._hang_s / NUM_LOOKS or LOOK_S)
        silent_s, num_heard = 0.0, 0
        while process.is_alive:
            await asyncio.sleep(look_s)
            if self._ready is None or not self._hang_s:
                continue
            if self._num_received != num_heard:
                silent_s, num_heard = 0.0, self._num_received
            # Not by the clock: a server that was itself held up has not listened all that time.
            silent_s += look_s
            step_s = self._ready.longest_step_s if self._unfinished else 0.0
            limit_s = max(self._hang_s, step_s)
            if silent_s >= limit_s:
                self._failure = self._failure or EngineStopped(
                    f"the engine process hangs: no sign of life for {limit_s:.3g} s"
                )
                process.kill()
                return
            if not self._is_pinged:
                self._is_pinged = True
                self._send(Ping())
        await asyncio.sleep(look_s)  # its last words are still on the way

    def _receive(self, message: ToServer) -> None:
        self._num_received += 1
        if isinstance(message, Tokens):
            for output in message.outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:  # else its client has gone
                    stream.put(output)
                if output.finish_reason is not None:
                    self._streams.pop(output.request_id, None)
                    self._unfinished.discard(output.request_id)
                    self._on_finish(output)
        elif isinstance(message, Explanation):
            question = self._questions.get(message.question_id)
            if question is not None and not question.done():  # else nobody waits any more
                question.set_result(message)
        elif isinstance(message, Alive):
            self._is_pinged = False
        elif isinstance(message, Ready):
            self._ready = message
            self._settled.set()
        elif isinstance(message, Failed):
            self._failure = revive_error(message.kind, message.message)

    def _end(self, why: str) -> None:
        """Nothing more comes from this engine."""
        self._failure = self._failure or EngineStopped(why)
        self.stopped.set()
        self._settled.set()
        self._fail_all()

    def _fail_all(self) -> None:
        for stream in set(self._streams.values()):
            stream.fail(str(self._failure), EngineStopped.__name__)
        self._streams.clear()
        for question in self._questions.values():
            if not question.done():
                question.set_exception(EngineStopped(str(self._failure)))
