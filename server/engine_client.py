"""EngineClient: the server's end of the engine process, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from msgspec import DecodeError

from specdec.config import EngineConfig
from specdec.errors import EngineStopped, SpecdecError
from specdec.server.messages import (
    HEADER_LEN,
    Abort,
    Explain,
    Explanation,
    Failed,
    Output,
    Ready,
    Shutdown,
    Start,
    Submit,
    ToEngine,
    Tokens,
    ToServer,
    decode_to_server,
    encode_frame,
    frame_len,
    revive_error,
)

ENGINE_COMMAND = (sys.executable, "-m", "specdec.server.engine_process")
EXIT_WAIT_S = 5.0  # how long a child may take to end before it is killed
EXPLAIN_WAIT_S = 5.0  # a step, after which the engine answers, is usually a hundredth of that


class OutputStream:
    """Outputs of the requests submitted together, in order of arrival, until each has finished.

    It holds at most one output per request: what is not fetched in time is merged, so a slow
    reader costs a bounded amount of memory and never holds the engine up. Always `close()` it:
    that aborts whatever is still running.
    """

    def __init__(self, client: EngineClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._unfinished = set(request_ids)
        self._waiting: dict[str, Output] = {}
        self._arrival = asyncio.Event()

    def put(self, output: Output) -> None:
        """Take in news from the engine."""
        waiting = self._waiting.get(output.request_id)
        if waiting is None:
            self._waiting[output.request_id] = output
        else:
            waiting.merge(output)
        self._arrival.set()

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
            self._arrival.clear()
            await self._arrival.wait()
        output = self._waiting.pop(next(iter(self._waiting)))
        if output.finish_reason is not None:
            self._unfinished.discard(output.request_id)
            self._client.forget(output.request_id)
        return output

    def close(self) -> None:
        """Abort what has not finished; safe to call at any time and more than once."""
        for request_id in self._unfinished:
            self._client.abort(request_id)
        self._unfinished.clear()
        self._waiting.clear()


class EngineClient:
    """Starts the engine process, submits requests to it and notices when it dies.

    Example:
        client = EngineClient()
        await client.start(config)
        ready = await client.wait_ready()
        stream = client.submit([Submit("r-0", (1, 2), SamplingParams())])
    """

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._command = command
        self._streams: dict[str, OutputStream] = {}
        self._questions: dict[int, asyncio.Future[Explanation]] = {}
        self._num_questions = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready: Ready | None = None
        self._settled = asyncio.Event()  # ready or stopped
        self._failure: SpecdecError | None = None
        self.stopped = asyncio.Event()

    async def start(self, config: EngineConfig) -> None:
        """Start the engine process; its model loads while this server goes on."""
        assert self._process is None, "an EngineClient starts one engine"
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
                process_group=0,  # a terminal's Ctrl-C reaches the server alone
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))
        self._send(Start(config))

    async def wait_ready(self) -> Ready:
        """The engine's description; raises the error that kept it from starting."""
        await self._settled.wait()
        if self._ready is None:
            raise self._failure or EngineStopped("the engine process ended while starting")
        return self._ready

    @property
    def failure(self) -> SpecdecError | None:
        """Why the engine stopped, once it has."""
        return self._failure

    def check_ready(self) -> Ready:
        """The engine's description; raises EngineStopped while it cannot take requests."""
        if self.stopped.is_set():
            raise EngineStopped(str(self._failure or "the engine has stopped"))
        if self._ready is None:
            raise EngineStopped("the model is loading")
        return self._ready

    def submit(self, requests: Sequence[Submit]) -> OutputStream:
        """Run requests and return the stream of their outputs, the first one empty for each.

        Raises EngineStopped when the engine is not ready.
        """
        self.check_ready()
        stream = OutputStream(self, [request.request_id for request in requests])
        for request in requests:
            assert request.request_id not in self._streams, f"{request.request_id} runs already"
            self._streams[request.request_id] = stream
            self._send(request)
        return stream

    def abort(self, request_id: str) -> None:
        """Stop a request and drop what it still brings; unknown ids are ignored."""
        if self._streams.pop(request_id, None) is not None and not self.stopped.is_set():
            self._send(Abort(request_id))

    def forget(self, request_id: str) -> None:
        """Drop a finished request."""
        self._streams.pop(request_id, None)

    async def explain(
        self, max_decisions: int, *, wait_s: float = EXPLAIN_WAIT_S
    ) -> dict[str, Any]:
        """What the controller decides and why, as JSON, asked of the engine between two steps.

        Raises EngineStopped when the engine is not ready, stops, or takes longer than `wait_s`
        seconds; SpecdecError when it cannot say.
        Example: `(await client.explain(5))["decisions"][-1]["reason"]`.
        """
        self.check_ready()
        self._num_questions += 1
        question_id = self._num_questions
        answer: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        self._questions[question_id] = answer
        try:
            self._send(Explain(question_id, max_decisions))
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
        if self._reading is None or self._process is None:
            return
        self._failure = self._failure or EngineStopped("the server is shutting down")
        if self._ready is None:
            self._process.terminate()  # it is loading and does not listen
        elif not self.stopped.is_set():
            self._send(Shutdown())
        try:
            await asyncio.wait_for(asyncio.shield(self._reading), EXIT_WAIT_S)
        except TimeoutError:
            self._process.kill()
            await self._reading

    def _send(self, message: ToEngine) -> None:
        # Not drained: what a request may weigh is bounded, and the engine reads every step.
        assert self._writer is not None
        self._writer.write(encode_frame(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand out what the engine sends, until it is gone."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, DecodeError):
            while True:
                header = await reader.readexactly(HEADER_LEN)
                self._receive(decode_to_server(await reader.readexactly(frame_len(header))))
        await self._bury()

    def _receive(self, message: ToServer) -> None:
        if isinstance(message, Tokens):
            for output in message.outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:  # else its client has gone
                    stream.put(output)
        elif isinstance(message, Explanation):
            question = self._questions.get(message.question_id)
            if question is not None and not question.done():  # else nobody waits any more
                question.set_result(message)
        elif isinstance(message, Ready):
            self._ready = message
            self._settled.set()
        elif isinstance(message, Failed):
            self._failure = revive_error(message.kind, message.message)

    async def _bury(self) -> None:
        """The socket has closed: end the process, say why, and end every stream."""
        assert self._process is not None and self._writer is not None
        self._writer.close()
        code = await asyncio.to_thread(_reap, self._process)
        if self._failure is None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._failure = EngineStopped(f"the engine process {how}")
        self.stopped.set()
        self._settled.set()
        for stream in set(self._streams.values()):
            stream.fail(str(self._failure), EngineStopped.__name__)
        self._streams.clear()
        for question in self._questions.values():
            if not question.done():
                question.set_exception(EngineStopped(str(self._failure)))


def _reap(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
