"""Server-sent events: how chunks become bytes on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
PING_S = 15  # proxies drop connections that stay silent for 30 to 60 s

_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def to_json(value: object) -> bytes:
    """Compact JSON without raw characters that some clients take for the end of a line.

    Example: `to_json({"a": chr(0x2028)})` holds the six characters of the escape instead.
    """
    encoded = msgspec.json.encode(value)
    if encoded.isascii():
        return encoded
    return encoded.decode().translate(_LINE_ENDS).encode()


def event(value: object) -> bytes:
    """One event. Every event is a lone `data:` line: clients fail on `id:` and `event:` lines."""
    return b"data: " + to_json(value) + b"\n\n"


class EventStream(EventSourceResponse):
    """Sends events and comment pings; calls `on_close` exactly when it ends, however it ends.

    Lines end in a bare newline, since some clients split events on two of them only. A client that
    reads nothing is the connection's business.
    """

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(
            events,
            sep="\n",
            ping=PING_S,
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep=self.sep),
            headers={"Cache-Control": "no-cache"},
        )
        self._on_close = on_close

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """The library's time limit for each chunk costs more than all else that is done for it."""
        await send(message)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()
