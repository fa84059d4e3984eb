"""OpenRequest: a long request on a socket of its own, whose client may go away."""

from __future__ import annotations

import json
import socket
import struct
from typing import TYPE_CHECKING, Any

from tests.server.script import chat

if TYPE_CHECKING:
    from tests.server.conftest import RunningServer


def send(
    server: RunningServer, *, delay_s: float = 0.01, wait_s: float = 0, **fields: Any
) -> socket.socket:
    """Post a request that would go on for long and return the open connection."""
    asked = chat("on and on ", end=False, delay_s=delay_s, wait_s=wait_s)
    body = json.dumps({"max_tokens": 1500, **fields, **asked}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return server.open(head.encode() + body, timeout_s=10)


def hang_up(connection: socket.socket, how: str) -> None:
    """Leave by "close", or by "reset", which tells the server at once."""
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
