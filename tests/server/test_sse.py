"""Server-sent events: pings, escapes, and the end of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from specdec.server.sse import DONE, EventStream, event, to_json

SCOPE: dict[str, Any] = {"type": "http", "method": "POST"}


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


def test_json_keeps_its_meaning_and_holds_no_line_ends() -> None:
    text = 'a\u2028b\u2029c\u0085d\n漢 "\\u2028\\'
    encoded = to_json({"text": text})
    assert json.loads(encoded) == {"text": text}
    assert len(encoded.decode().splitlines()) == 1
    assert event({"a": 1}) == b'data: {"a":1}\n\n'


def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    sent: list[bytes] = []
    closed: list[bool] = []

    async def events() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.3)
        yield DONE

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    stream = EventStream(events(), on_close=lambda: closed.append(True))
    stream.ping_interval = 0.05
    asyncio.run(stream(SCOPE, never, send))
    assert b": ping\n\n" in sent, "a comment is the only ping that no client trips over"
    assert set(sent) == {b"", b": ping\n\n", DONE}
    assert closed == [True]


def test_a_stream_that_is_stuck_in_sending_closes_when_the_connection_does() -> None:
    closed: list[bool] = []

    async def events() -> AsyncIterator[bytes]:
        while True:
            yield DONE

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    stream = EventStream(events(), on_close=lambda: closed.append(True))
    asyncio.run(asyncio.wait_for(stream(SCOPE, receive, send), 5))
    assert closed == [True]
