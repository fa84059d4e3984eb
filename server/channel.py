"""Channel: the engine process's end of the socket, whole messages in and out."""

from __future__ import annotations

import select
import socket

from specdec.server.framing import HEADER_LEN, encode_frame, frame_len
from specdec.server.messages import ToEngine, ToServer, decode_to_engine

RECEIVE_LEN = 2**16


class Channel:
    """Sends and receives over a blocking socket.

    Example: `Channel(sock).receive(is_blocking=True)[0]` is the Start that comes first.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self.is_closed = False

    def send(self, message: ToServer) -> None:
        """Write a message; a server that is gone closes the channel instead of raising."""
        try:
            self._sock.sendall(encode_frame(message))
        except (BrokenPipeError, ConnectionResetError):
            self.is_closed = True

    def receive(self, *, is_blocking: bool) -> list[ToEngine]:
        """Every message that has arrived; when blocking, at least one unless the channel closes."""
        messages = self._take()
        while not self.is_closed and (self._has_data() or (is_blocking and not messages)):
            try:
                data = self._sock.recv(RECEIVE_LEN)
            except ConnectionResetError:
                data = b""
            self.is_closed = not data
            self._received += data
            messages += self._take()
        return messages

    def _has_data(self) -> bool:
        return bool(select.select([self._sock], [], [], 0)[0])

    def _take(self) -> list[ToEngine]:
        messages = []
        while len(self._received) >= HEADER_LEN:
            end = HEADER_LEN + frame_len(self._received[:HEADER_LEN])
            if len(self._received) < end:
                break
            messages.append(decode_to_engine(bytes(self._received[HEADER_LEN:end])))
            del self._received[:end]
        return messages
