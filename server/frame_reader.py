"""FrameReader: the whole frames of a connection, handed on in the very read that completes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from specdec.server.framing import HEADER_LEN, frame_len


class FrameReader(asyncio.Protocol):
    """Hands the body of each frame to `take`; what that raises ends the connection and is `error`.

    A stream reader would wake a task twice per frame, in every step of the engine.

    Example: `await loop.create_connection(lambda: FrameReader(print), sock=sock)`.
    """

    def __init__(self, take: Callable[[bytes], object]) -> None:
        self._take = take
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self.error: Exception | None = None
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.error is not None:
            return
        received = self._received
        received += data
        try:
            while len(received) >= HEADER_LEN:
                end = HEADER_LEN + frame_len(received[:HEADER_LEN])
                if len(received) < end:
                    return
                body = bytes(received[HEADER_LEN:end])
                del received[:end]
                self._take(body)
        except Exception as error:  # a bug on either side: nothing that follows can be trusted
            self.error = error
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def write(self, frame: bytes) -> None:
        """Send a frame; it waits in memory while the other side does not read."""
        assert self._transport is not None, "it is not connected"
        self._transport.write(frame)

    def close(self) -> None:
        """End the connection once what was written has been sent."""
        if self._transport is not None:
            self._transport.close()
