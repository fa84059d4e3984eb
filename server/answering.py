"""The routes that generate: chat completions and completions, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from specdec.errors import SpecdecError
from specdec.server.choice import Delta
from specdec.server.generation import Generation
from specdec.server.json_response import json_response
from specdec.server.protocol import ChatBody, CompletionBody, parse_body
from specdec.server.responses import BUG, ChatReply, CompletionReply, HttpError, Reply
from specdec.server.service import service_of
from specdec.server.sse import DONE, EventStream, event

Result = TypeVar("Result")


async def _chat(request: Request) -> Response:
    body = parse_body(await read_body(request), ChatBody)
    reply = ChatReply(body.model, includes_usage=body.includes_usage)
    return await _answer(request, body, reply)


async def _completions(request: Request) -> Response:
    body = parse_body(await read_body(request), CompletionBody)
    reply = CompletionReply(body.model, includes_usage=body.includes_usage)
    return await _answer(request, body, reply)


async def _answer(request: Request, body: ChatBody | CompletionBody, reply: Reply) -> Response:
    generation = await _unless_gone(request, service_of(request).generate(body, reply))
    if body.stream:
        return EventStream(_events(generation, reply), on_close=generation.close)
    try:
        return json_response(await _unless_gone(request, _whole(generation, reply)))
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


async def read_body(request: Request) -> bytes:
    """The whole body, as long as the settings allow."""
    longest = service_of(request).settings.max_body_len
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > longest:
            raise HTTPException(413, f"the body is longer than {longest} bytes")
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


ROUTES = [
    Route("/v1/chat/completions", _chat, methods=["POST"]),
    Route("/v1/completions", _completions, methods=["POST"]),
]
