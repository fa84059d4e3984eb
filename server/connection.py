"""Connection: HTTP/1.1 by uvicorn, with bounds on how slow and how long-winded a client may be."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
import uuid
from array import array
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.server.responses import HttpError
from specdec.server.settings import ServerSettings
from specdec.server.sse import to_json
from specdec.server.timer import Timer

LINGER_S = 5.0  # for the rest of a request that was refused, so that the client reads why

_TOO_SLOW = HttpError(408, "the request's head did not come in time", "invalid_request_error")
_TOO_LONG = HttpError(
    431, "the request's head is too long", "invalid_request_error", code="request_too_large"
)
_NOT_HTTP = HttpError(400, "the request is not valid HTTP/1.1", "invalid_request_error")
_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class Connection(H11Protocol):
    """What uvicorn's protocol leaves to others: a slow head, a client that reads nothing, errors.

    - a request's head has `header_timeout_s` from the first look at it, then 408;
    - bytes that wait for a client that takes none of them for `send_timeout_s` are dropped with
      the connection, so its answer ends as at any disconnect;
    - what a client sends after its request is read up to the length of a head, for only a
      connection that is read tells when the client goes away;
    - errors found before there is a request have the same JSON as all others.

    Example: `uvicorn.Config(app, http=partial(Connection, settings=settings))`.
    """

    def __init__(self, *args: Any, settings: ServerSettings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._head = Timer()  # until a head has come
        self._rest = Timer()  # until the rest of a refused request has come
        self._sending = Timer()  # until the client takes bytes
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it too
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._rest, self._sending):
            timer.stop()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it running after an error

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._rest.stop()
            self._await_head()
        else:
            self._head.stop()
        if self.conn.their_state is h11.DONE and self.flow.read_paused:
            rest, _ = self.conn.trailing_data
            if len(rest) < self._settings.max_header_len:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_sending()
        is_over = self.cycle.response_complete and not self.transport.is_closing()
        if is_over and self.conn.their_state is h11.SEND_BODY:
            self._rest.start(LINGER_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._sending.stop()

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 refused, which is the exception that is being handled."""
        refusal = sys.exception()
        hint = getattr(refusal, "error_status_hint", 400)
        self._refuse(_TOO_LONG if hint == 431 else _NOT_HTTP)

    def _await_head(self) -> None:
        if not self.transport.is_closing():
            self._head.start(self._settings.header_timeout_s, self._give_up)

    def _give_up(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(_TOO_SLOW)
        else:
            self.transport.close()

    def _refuse(self, error: HttpError) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # what the application still says has no place to go
        self._is_refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
        else:
            body = to_json(error.as_json())
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
                ("x-request-id", f"req-{uuid.uuid4().hex}"),
            ]
            for event in (
                h11.Response(
                    status_code=error.status, headers=headers, reason=_PHRASES[error.status]
                ),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.write_eof()
            # To close now, with bytes unread, would reset the connection and lose the answer.
            self._rest.start(LINGER_S, self.transport.abort)

    def _watch_sending(self) -> None:
        self._sending.start(self._settings.send_timeout_s, self._check_sending, self._num_untaken())

    def _check_sending(self, num_before: int) -> None:
        # Nothing is added to the buffer while it is watched: it is too full, or all is in it.
        if not self.transport.get_write_buffer_size():
            return
        if self._num_untaken() >= num_before:
            self.transport.abort()
        else:
            self._watch_sending()

    def _num_untaken(self) -> int:
        """Bytes that the client has not taken, those in the system's hands included.

        The system asks for more only once much of its own buffer is free, so by the rest alone a
        client that reads slowly would look like one that reads nothing.
        """
        queued = array("i", [0])
        with contextlib.suppress(OSError, AttributeError):  # a system that does not tell
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + queued[0]
