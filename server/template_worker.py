"""The template worker's own process: renders chat templates within bounds of memory and time.

Started by TemplatePool as `python -m specdec.server.template_worker FD`, FD being one end of a
socket pair; each message is a 4-byte big-endian length and a msgpack body.

    server -> worker    Setup, then Render after Render
    worker -> server    Rendered for each

It ends when the socket closes, and by an alarm soon after the limit of what it renders, so it does
not outlive the server by more than that.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from specdec.chat_template import ChatTemplates
from specdec.errors import InvalidRequest, SpecdecError
from specdec.server.framing import HEADER_LEN, encode_frame

ALARM_S = 1.0  # how much later than the server the worker itself gives up


class Setup(Struct):
    """First message: the checkpoint's templates, and bounds in characters and bytes."""

    sources: dict[str, str]
    special_tokens: dict[str, str]
    max_len: int
    max_memory: int  # beyond what the process has once it has loaded


class Render(Struct):
    """Render a chat, with the request's own template if there is a `source`."""

    messages: list[Any]
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    limit_s: float
    source: str | None = None


class Rendered(Struct):
    """The text, or why there is none: `error_kind` names a class of `specdec.errors`."""

    text: str = ""
    error: str | None = None
    error_kind: str | None = None
    error_param: str | None = None


def serve(stream: BinaryIO, sock: socket.socket) -> None:
    """Render what comes until the socket closes; raises msgspec.DecodeError for damaged frames."""
    setup = msgspec.msgpack.decode(_next(stream), type=Setup)
    templates = ChatTemplates(setup.sources, setup.special_tokens)
    import jinja2.sandbox  # noqa: F401  # loaded before memory is bounded

    _bound_memory(setup.max_memory)
    sock.sendall(encode_frame(Rendered()))
    while body := _next(stream):
        sock.sendall(_answer(templates, body, setup.max_len))


def _answer(templates: ChatTemplates, body: bytes, max_len: int) -> bytes:
    request = msgspec.msgpack.decode(body, type=Render)
    signal.setitimer(signal.ITIMER_REAL, request.limit_s + ALARM_S)
    try:
        text = templates.render(
            request.messages,
            request.variables,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            source=request.source,
            max_len=max_len,
        )
        return encode_frame(Rendered(text))
    except SpecdecError as error:
        param = error.param if isinstance(error, InvalidRequest) else None
        return encode_frame(Rendered("", str(error), type(error).__name__, param))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _next(stream: BinaryIO) -> bytes:
    """The next frame's body; empty when the server has gone."""
    header = stream.read(HEADER_LEN)
    length = int.from_bytes(header, "big")
    body = stream.read(length) if len(header) == HEADER_LEN else b""
    return body if len(body) == length else b""


def _bound_memory(extra: int) -> None:
    """Let the process have `extra` bytes more than it has now."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = num_pages * os.sysconf("SC_PAGE_SIZE") + extra
    bound = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def main(argv: list[str]) -> int:
    """Entry point of the process; the only argument is the socket's descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    with socket.socket(fileno=int(argv[0])) as sock, sock.makefile("rb") as stream:
        try:
            serve(stream, sock)
        except (msgspec.DecodeError, ConnectionError, MemoryError) as error:
            reason = str(error) or type(error).__name__
            print(f"error: the template worker ends: {reason}"[:300], file=sys.stderr)
            return SpecdecError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
