"""Access log: a line of JSON on stderr for each HTTP request, without anything a client wrote."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.server.caller import caller_in
from specdec.server.load_metrics import CLIENT_GONE
from specdec.server.stderr_lines import say

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class AccessLogMiddleware:
    """Says when an answer has ended: its route, status, time and tokens.

    The route is the template that the path matched, null where none did: no path, query, header,
    prompt or key is ever logged. Of what clients send only the request id is, and only if it is a
    plain word.

    Example of a line: `{"time": "2026-01-02T03:04:05.678+00:00", "method": "POST", "route":
    "/v1/completions", "status": 200, "request_id": "req-1", "seconds": 0.412, "prompt_tokens": 9,
    "completion_tokens": 64}`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status, request_id = CLIENT_GONE, ""

        async def send_and_see(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = Headers(raw=message["headers"]).get("x-request-id", "")
            await send(message)

        try:
            await self.app(scope, receive, send_and_see)
        finally:
            line = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "method": scope["method"] if scope["method"] in METHODS else "other",
                "route": getattr(scope.get("route"), "path", None),
                "status": status,
                "request_id": request_id,
                "seconds": round(time.perf_counter() - started, 4),
                **_outcome(scope),
            }
            say(json.dumps(line))


def _outcome(scope: Scope) -> dict[str, object]:
    """Tokens, and how each choice ended; null for one that did not, as at an error or an abort."""
    generation = caller_in(scope).generation
    if generation is None:
        return {}
    usage = generation.usage
    ends = [choice.finish_reason for choice in generation.preparation.choices]
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "finish_reasons": [end if end in ("stop", "length") else None for end in ends],
    }
