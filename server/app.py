"""The HTTP application: routes, errors, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from importlib.metadata import version
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.errors import EngineStopped, InvalidRequest, SpecdecError
from specdec.server.choice import Delta
from specdec.server.engine_client import EngineClient
from specdec.server.generation import Generation, prepare
from specdec.server.messages import Ready
from specdec.server.protocol import ChatBody, CompletionBody, ModelNotFound, parse_body
from specdec.server.responses import ChatReply, CompletionReply, HttpError, Reply
from specdec.server.sse import DONE, EventStream, event, to_json
from specdec.tokenizer import Tokenizer

MAX_BODY_LEN = 32 * 2**20
RETRY_AFTER_S = 1
MAX_DECISIONS = 200  # of one explanation
BUG = HttpError(500, "the server failed; its log has the details", "server_error")

Result = TypeVar("Result")


class Service:
    """What the routes share: the engine, the tokenizer once it is loaded, and what is running."""

    def __init__(self, engine: EngineClient, served_model_name: str) -> None:
        self.engine = engine
        self.served_model_name = served_model_name
        self.created = int(time.time())
        self.tokenizer: Tokenizer | None = None
        self.is_draining = False
        self.running: set[Generation] = set()

    def check_ready(self) -> Ready:
        """The engine's description; raises EngineStopped when requests cannot be served now."""
        if self.is_draining:
            raise EngineStopped("the server is shutting down")
        ready = self.engine.check_ready()
        if self.tokenizer is None:
            raise EngineStopped("the model is loading")
        return ready

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound unless this is the served model."""
        if name != self.served_model_name:
            raise ModelNotFound(
                f"this server has no model {name[:100]!r}; it serves {self.served_model_name!r}",
                param="model",
            )

    async def generate(self, body: ChatBody | CompletionBody, reply: Reply) -> Generation:
        """Start the generation that a body asks for, accepted by the engine."""
        ready = self.check_ready()
        self.check_model(body.model)
        assert self.tokenizer is not None
        preparation = await asyncio.to_thread(
            prepare, body, reply_id=reply.id, tokenizer=self.tokenizer, ready=ready
        )
        self.check_ready()
        generation = Generation(self.engine, preparation, on_close=self.running.discard)
        self.running.add(generation)
        try:
            await generation.accepted()
        except BaseException:
            generation.close()
            raise
        return generation

    async def idle(self) -> None:
        """Wait until nothing runs."""
        while self.running:
            await asyncio.sleep(0.02)


def create_app(service: Service) -> Starlette:
    """The ASGI application of a service.

    Example: `uvicorn.run(create_app(Service(EngineClient(), "my-model")))` answers /health with
    503 until the engine has started.
    """
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", _chat, methods=["POST"]),
            Route("/v1/completions", _completions, methods=["POST"]),
            Route("/v1/models", _models),
            Route("/health", _health),
            Route("/version", _version),
            Route("/debug/speculation", _speculation),
        ],
        middleware=[Middleware(RequestIdMiddleware)],
        exception_handlers={
            SpecdecError: _answer_error,
            HTTPException: _answer_http_exception,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_bug,
        },
    )
    app.state.service = service
    return app


async def _chat(request: Request) -> Response:
    body = parse_body(await _read_body(request), ChatBody)
    reply = ChatReply(body.model, includes_usage=body.includes_usage)
    return await _answer(request, body, reply)


async def _completions(request: Request) -> Response:
    body = parse_body(await _read_body(request), CompletionBody)
    reply = CompletionReply(body.model, includes_usage=body.includes_usage)
    return await _answer(request, body, reply)


async def _models(request: Request) -> Response:
    service = _service(request)
    ready = service.check_ready()
    model = {
        "id": service.served_model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "specdec",
        "root": ready.model_name,
        "max_model_len": ready.max_model_len,
    }
    return _json({"object": "list", "data": [model]})


async def _health(request: Request) -> Response:
    _service(request).check_ready()
    return _json({"status": "ok"})


async def _version(request: Request) -> Response:
    return _json({"version": version("specdec-server")})


async def _speculation(request: Request) -> Response:
    """What the controller decides and why; `?last=5` asks for the newest five decisions."""
    service = _service(request)
    last = request.query_params.get("last", "20")
    if not (re.fullmatch("[0-9]{1,3}", last) and 1 <= int(last) <= MAX_DECISIONS):
        raise InvalidRequest(
            f"last must be a whole number between 1 and {MAX_DECISIONS}", param="last"
        )
    ready = service.check_ready()
    facts = await service.engine.explain(int(last))
    return _json({"model": service.served_model_name, "drafter": ready.drafter, **facts})


async def _answer(request: Request, body: ChatBody | CompletionBody, reply: Reply) -> Response:
    generation = await _unless_gone(request, _service(request).generate(body, reply))
    if body.stream:
        return EventStream(_events(generation, reply), on_close=generation.close)
    try:
        return _json(await _unless_gone(request, _whole(generation, reply)))
    finally:
        generation.close()


async def _events(generation: Generation, reply: Reply) -> AsyncIterator[bytes]:
    """The stream of one answer; an error after its start is its last event."""
    try:
        async for progress in generation.progress():
            choice = progress.choice
            if progress.is_first and (opening := reply.opening(choice)) is not None:
                yield event(opening)
            if not progress.delta.is_empty:
                yield event(reply.body(choice, progress.delta))
            if progress.is_last:
                yield event(reply.closing(choice))
        if reply.includes_usage:
            yield event(reply.totals(generation.usage, generation.metrics))
        yield DONE
    except SpecdecError as error:
        yield event(HttpError.of(error).as_json())
    except Exception:  # a bug: without this event the client would take half an answer for whole
        yield event(BUG.as_json())
        raise


async def _whole(generation: Generation, reply: Reply) -> object:
    """The answer that is not streamed."""
    deltas: dict[int, list[Delta]] = {}
    async for progress in generation.progress():
        deltas.setdefault(progress.choice.index, []).append(progress.delta)
    choices = [
        reply.whole(choice, Delta.join(deltas[choice.index]))
        for choice in generation.preparation.choices
    ]
    return reply.answer(choices, generation.usage, generation.metrics)


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_LEN:
            raise HTTPException(413, f"the body is longer than {MAX_BODY_LEN} bytes")
    return bytes(body)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, but cancel it and raise ClientDisconnect if the client goes away first."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")


def _error(error: HttpError, headers: dict[str, str] | None = None) -> Response:
    if error.status == 503:
        headers = {"Retry-After": str(RETRY_AFTER_S), **(headers or {})}
    return _json(error.as_json(), error.status, headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecdecError)
    return _error(HttpError.of(error))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
    body = HttpError(
        error.status_code,
        error.detail,
        "invalid_request_error",
        code=code.get(error.status_code),
    )
    return _error(body, dict(error.headers or {}))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client has gone; a log may show the status


async def _answer_bug(request: Request, error: Exception) -> Response:
    return _error(BUG)


class RequestIdMiddleware:
    """Gives every answer an X-Request-Id: the client's own if it is a plain word, else a new one.

    The id is only ever echoed; it names nothing inside the server.
    """

    _plain = re.compile(r"[A-Za-z0-9._-]{1,128}")

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if self._plain.fullmatch(given) else f"req-{uuid.uuid4().hex}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)
