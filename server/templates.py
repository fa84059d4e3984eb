"""TemplatePool: chat templates rendered by processes that may be slow, greedy or killed."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from specdec.errors import EngineStopped, InvalidRequest, Overloaded
from specdec.server.child_process import ChildProcess
from specdec.server.framing import HEADER_LEN, encode_frame, frame_len
from specdec.server.messages import revive_error
from specdec.server.settings import ServerSettings
from specdec.server.template_worker import Render, Rendered, Setup
from specdec.tokenizer import Tokenizer

WORKER_COMMAND = (sys.executable, "-m", "specdec.server.template_worker")
MAX_WORKERS = 2  # for the checkpoint's templates, and as many again for those of requests
MAX_MEMORY = 256 * 2**20  # bytes a worker may take to render
LEAST_OUTPUT = 2**20  # characters
OUTPUT_PER_TOKEN = 64  # characters; tokens are shorter, so what is cut would not fit either
PATIENCE_S = 0.05  # a busy worker is waited for so long before another one is started
START_S = 30.0  # a worker that has not started by then never will


@dataclass(frozen=True)
class RenderedChat:
    """A chat as its template wrote it.

    `mark` stands in the control tokens that are only text (`specdec.control_tokens`); it is empty
    where the messages hold none.
    """

    text: str
    mark: str = ""


class TemplatePool:
    """Renders chats in worker processes with bounds: seconds, bytes, characters.

    What goes beyond them fails alone; its worker is killed and made anew. A template that a request
    brings is never rendered by a worker of the checkpoint's own, so it holds up only its like.

    Example:
        pool = TemplatePool(tokenizer, settings, max_model_len)
        await pool.start()
        chat = await pool.render([{"role": "user", "content": "Hi"}])
        ids = tokenizer.encode_rendered(chat.text, chat.mark)
        await pool.close()
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        max_model_len: int,
        *,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self._control = tokenizer.control
        self._limit_s = settings.template_timeout_s
        self._takes_templates = settings.request_templates
        setup = Setup(
            tokenizer.templates.sources,
            tokenizer.templates.special_tokens,
            max(LEAST_OUTPUT, OUTPUT_PER_TOKEN * max_model_len),
            MAX_MEMORY,
        )
        self._own = _Workers(command, setup)
        self._brought = _Workers(command, setup)

    async def start(self) -> None:
        """Start the first worker, so that no request waits for it."""
        await self._own.start()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> RenderedChat:
        """The prompt text of a chat; `variables` are what its template may read besides.

        Raises InvalidRequest for a template that refuses, is slow or greedy, or comes with the
        request unasked; ContextLengthExceeded; Overloaded when other templates keep every worker
        busy.
        """
        self._check_allowed(chat_template, variables or {})
        request = Render(
            list(messages),
            dict(variables or {}),
            add_generation_prompt,
            continue_final_message,
            self._limit_s,
            chat_template,
        )
        # In a thread, since messages may be long.
        body, mark = await asyncio.to_thread(self._guarded, request)
        workers = self._own if chat_template is None else self._brought
        answer = await workers.ask(body, self._limit_s)
        if answer.error is not None:
            raise revive_error(answer.error_kind, answer.error, answer.error_param)
        return RenderedChat(answer.text, mark)

    async def close(self) -> None:
        """End every worker; what they render fails with EngineStopped."""
        await asyncio.gather(self._own.close(), self._brought.close())

    def _check_allowed(self, chat_template: str | None, variables: Mapping[str, Any]) -> None:
        if "chat_template" in variables:
            raise InvalidRequest(
                "chat_template_kwargs must not set chat_template; it is a field of its own, "
                "taken by a server started with --allow-request-templates",
                param="chat_template_kwargs",
            )
        if chat_template is not None and not self._takes_templates:
            raise InvalidRequest(
                "chat_template: this server takes no templates from requests; "
                "start it with --allow-request-templates",
                param="chat_template",
            )

    def _guarded(self, request: Render) -> tuple[bytes, str]:
        """The request as a frame, its control tokens marked, and the mark."""
        (messages, variables), mark = self._control.guard((request.messages, request.variables))
        try:
            guarded = msgspec.structs.replace(request, messages=messages, variables=variables)
            return encode_frame(guarded), mark
        except RecursionError:
            raise InvalidRequest("messages are nested too deeply", param="messages") from None
        except OverflowError:  # a whole number beyond 64 bits
            raise InvalidRequest(
                "a number in messages or chat_template_kwargs is too big", param="messages"
            ) from None


class _Workers:
    """A few worker processes: one is hot, others are started when it is busy for long."""

    def __init__(self, command: Sequence[str], setup: Setup) -> None:
        self._command = command
        self._setup = encode_frame(setup)
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        self._workers: set[_Worker] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Start a worker and wait until it listens."""
        worker = await self._spawn()
        try:
            await worker.started()
        except (EOFError, ConnectionError, ValueError, TimeoutError):
            raise EngineStopped("the process for chat templates does not start") from None
        self._idle.put_nowait(worker)

    async def ask(self, body: bytes, limit_s: float) -> Rendered:
        """The answer to a request; waiting for a worker counts into the limit, starting one not.

        Raises InvalidRequest, Overloaded, EngineStopped.
        """
        deadline = asyncio.get_running_loop().time() + limit_s
        worker = await self._take(deadline)
        # If the client goes, the answer is still read: the worker is good for the next request.
        return await asyncio.shield(asyncio.create_task(self._ask(worker, body, deadline, limit_s)))

    async def _ask(self, worker: _Worker, body: bytes, deadline: float, limit_s: float) -> Rendered:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if worker.is_gone:  # while idle, so this request has nothing to do with it
            await self._replace(worker)
            worker = self._idle.get_nowait()
        try:
            await worker.started()
            async with asyncio.timeout_at(deadline + loop.time() - began):
                answer = await worker.ask(body)
        except TimeoutError:
            await self._replace(worker)
            raise InvalidRequest(
                f"the chat template took longer than {limit_s:g} s", param="messages"
            ) from None
        except (EOFError, ConnectionError, ValueError):  # gone, or its frames are damaged
            await self._replace(worker)
            raise InvalidRequest(
                "the chat template broke the process that renders it", param="messages"
            ) from None
        self._idle.put_nowait(worker)
        return answer

    async def _take(self, deadline: float) -> _Worker:
        """An idle worker, or a new one where none has been idle for a while."""
        patience = min(asyncio.get_running_loop().time() + PATIENCE_S, deadline)
        try:
            async with asyncio.timeout_at(patience if self._workers else 0):
                return await self._idle.get()
        except TimeoutError:
            if len(self._workers) < MAX_WORKERS:
                return await self._spawn()
        try:
            async with asyncio.timeout_at(deadline):
                return await self._idle.get()
        except TimeoutError:
            raise Overloaded(
                "chat templates of other requests keep every worker busy; try again"
            ) from None

    async def _spawn(self) -> _Worker:
        if self._is_closed:
            raise EngineStopped("the server is shutting down")
        try:
            worker = _Worker(self._command)
        except OSError as error:
            raise EngineStopped(f"no process for chat templates: {error.strerror}") from None
        self._workers.add(worker)
        try:
            await worker.connect(self._setup)
        except BaseException:  # the client has gone meanwhile
            self._workers.discard(worker)
            await worker.end()
            raise
        return worker

    async def _replace(self, worker: _Worker) -> None:
        """End a worker and have a new one in its place."""
        self._workers.discard(worker)
        await worker.end()
        self._idle.put_nowait(await self._spawn())

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(worker.end() for worker in self._workers))
        self._workers.clear()


class _Worker:
    """One worker process and the server's end of its socket."""

    def __init__(self, command: Sequence[str]) -> None:
        self._sock, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = ChildProcess(command, theirs.fileno())
        except BaseException:
            self._sock.close()
            raise
        self._reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None
        self._is_started = False

    async def connect(self, setup: bytes) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._sock)
        self._writer.write(setup)

    @property
    def is_gone(self) -> bool:
        return self._reader.at_eof()

    async def started(self) -> None:
        """Wait until it listens; raises EOFError or TimeoutError if it does not."""
        if not self._is_started:
            async with asyncio.timeout(START_S):
                await self._receive()
            self._is_started = True

    async def ask(self, body: bytes) -> Rendered:
        assert self._writer is not None, "connect comes first"
        self._writer.write(body)
        await self._writer.drain()
        return await self._receive()

    async def _receive(self) -> Rendered:
        header = await self._reader.readexactly(HEADER_LEN)
        body = await self._reader.readexactly(frame_len(header))
        return msgspec.msgpack.decode(body, type=Rendered)

    async def end(self) -> None:
        """Kill the process, reap it and close the socket."""
        await self._process.ended(0.0)
        self._sock.close()
        if self._writer is not None:
            self._writer.close()
