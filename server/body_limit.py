"""Body limit: how long a request's head and body may be, and how long the body may take."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.server.json_response import error_response
from specdec.server.responses import HttpError
from specdec.server.settings import ServerSettings


class BodyLimitMiddleware:
    """Answers 413 for a body that is too long, 408 for one that is too slow, 431 for a long head.

    A length that a client states is believed at once; what comes in chunks is counted. The
    clock runs while the application waits for the body, and never after its end.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self._settings = settings
        self._too_long = f"the body is longer than {settings.max_body_len} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif (refusal := self._refusal(scope)) is not None:
            await error_response(refusal)(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_read, deadline = 0, 0.0
        is_complete = has_started = False

        async def read() -> Message:
            """The next part; once an answer has begun, a refusal can only be a disconnect."""
            nonlocal num_read, deadline, is_complete
            if is_complete:
                return await receive()
            deadline = deadline or asyncio.get_running_loop().time() + self._settings.body_timeout_s
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                return refuse(408, "the request's body did not come in time")
            num_read += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_read > self._settings.max_body_len:
                return refuse(413, self._too_long)
            return message

        def refuse(status: int, reason: str) -> Message:
            if has_started:
                return {"type": "http.disconnect"}
            raise HTTPException(status, reason)

        async def send_and_see(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        await self.app(scope, read, send_and_see)

    def _refusal(self, scope: Scope) -> HttpError | None:
        settings = self._settings
        head_len = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        head_len += len(scope["raw_path"]) + len(scope["query_string"])
        if head_len > settings.max_header_len:
            return HttpError(
                431,
                f"the request's head is longer than {settings.max_header_len} bytes",
                "invalid_request_error",
                code="request_too_large",
            )
        stated = dict(scope["headers"]).get(b"content-length", b"0")
        if int(stated) > settings.max_body_len:  # h11 lets digits alone through
            return HttpError(413, self._too_long, "invalid_request_error", code="request_too_large")
        return None
