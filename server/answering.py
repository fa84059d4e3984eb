"""The routes that generate: chat completions and completions, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from specdec.errors import SpecdecError
from specdec.server.caller import caller_of
from specdec.server.choice import Choice, Delta
from specdec.server.generation import Generation
from specdec.server.json_response import json_response
from specdec.server.parsing import parse_body
from specdec.server.protocol import ChatBody, CompletionBody
from specdec.server.responses import BUG, ChatReply, CompletionReply, HttpError, Reply
from specdec.server.service import service_of
from specdec.server.sse import DONE, EventStream, event
from specdec.server.usage import Usage

# Bytes of an event, below what readers allow a line. One token's own are not split, nor the ids of
# a prompt.
MAX_LINE_LEN = 2**16

Result = TypeVar("Result")


async def _chat(request: Request) -> Response:
    return await _answer(request, ChatBody, ChatReply)


async def _completions(request: Request) -> Response:
    return await _answer(request, CompletionBody, CompletionReply)


async def _answer(
    request: Request, kind: type[ChatBody] | type[CompletionBody], reply_kind: type[Reply]
) -> Response:
    service = service_of(request)
    settings = service.settings
    body = parse_body(await request.body(), kind, strict=settings.strict_params)
    fingerprint = service.check_ready().fingerprint
    reply = reply_kind(body, fingerprint=fingerprint, force_usage=settings.force_usage)
    generating = service.generate(body, reply, caller_of(request))
    generation = await _unless_gone(request, generating)
    if body.stream:
        return EventStream(_events(generation, reply), on_close=generation.close)
    try:
        return json_response(await _unless_gone(request, _whole(generation, reply)))
    finally:
        generation.close()


async def _events(generation: Generation, reply: Reply) -> AsyncIterator[bytes]:
    """The stream of one answer; an error after its start is its last event."""
    num_sent = 0  # output tokens that the chunks so far stand for
    try:
        async for progress in generation.progress():
            choice, deltas = progress.choice, progress.deltas
            if progress.is_first:
                opening = reply.opening(choice, _usage_so_far(generation, reply, num_sent))
                if opening is not None:
                    yield event(opening)
            for part in [[delta] for delta in deltas] if reply.is_by_token else [deltas]:
                for line in _lines(generation, reply, choice, part, num_sent):
                    yield line
                num_sent += _num_tokens(part)
            if progress.is_last:
                yield event(reply.closing(choice, _usage_so_far(generation, reply, num_sent)))
        if reply.includes_usage:
            yield event(reply.totals(generation.usage, generation.metrics))
        yield DONE
    except SpecdecError as error:
        yield event(HttpError.of(error).as_json())
    except Exception:  # a bug: without this event the client would take half an answer for whole
        yield event(BUG.as_json())
        raise


def _lines(
    generation: Generation, reply: Reply, choice: Choice, deltas: Sequence[Delta], num_sent: int
) -> Iterator[bytes]:
    """Deltas as one event, or as several where that would be too long.

    What tells nothing is sent only where chunks count tokens.
    """
    delta = Delta.join(deltas)
    if delta.is_empty and not (reply.is_by_token and delta.num_tokens):
        return
    usage = _usage_so_far(generation, reply, num_sent + delta.num_tokens)
    line = event(reply.body(choice, delta, usage))
    if len(line) <= MAX_LINE_LEN or len(deltas) == 1:
        yield line
        return
    half = len(deltas) // 2
    first, rest = deltas[:half], deltas[half:]
    yield from _lines(generation, reply, choice, first, num_sent)
    yield from _lines(generation, reply, choice, rest, num_sent + _num_tokens(first))


def _usage_so_far(generation: Generation, reply: Reply, num_sent: int) -> Usage | None:
    """The counts that a chunk shows, if it does."""
    return generation.usage_at(num_sent) if reply.includes_usage_so_far else None


def _num_tokens(deltas: Sequence[Delta]) -> int:
    return sum(delta.num_tokens for delta in deltas)


async def _whole(generation: Generation, reply: Reply) -> object:
    """The answer that is not streamed."""
    deltas: dict[int, list[Delta]] = {}
    async for progress in generation.progress():
        deltas.setdefault(progress.choice.index, []).extend(progress.deltas)
    finished = [
        (choice, Delta.join(deltas[choice.index])) for choice in generation.preparation.choices
    ]
    return reply.answer(finished, generation.usage, generation.metrics)


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
