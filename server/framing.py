"""Framing: how a message between two of the server's processes is cut out of the bytes.

A frame is a 4-byte big-endian length and a msgpack body: data only, nothing that could run.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

HEADER_LEN = 4
MAX_FRAME_LEN = 256 * 2**20  # a longer frame is a bug on the other side, not data

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Struct) -> bytes:
    """The message with its length in front, ready for the socket."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER_LEN, "big") + body


def frame_len(header: bytes | bytearray | memoryview) -> int:
    """Length of the body that follows a header; ValueError when it cannot be ours."""
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_LEN:
        raise ValueError(f"a frame of {length} bytes is too long")
    return length
