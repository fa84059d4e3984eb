"""json_response, error_response: answers in JSON, errors in the one shape that clients read."""

from __future__ import annotations

from starlette.responses import Response

from specdec.server.responses import HttpError
from specdec.server.sse import to_json

RETRY_AFTER_S = 1


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A value as compact JSON."""
    return Response(to_json(value), status, headers, media_type="application/json")


def error_response(error: HttpError, headers: dict[str, str] | None = None) -> Response:
    """An error; a 503 says when to try again."""
    if error.status == 503:
        headers = {"Retry-After": str(RETRY_AFTER_S), **(headers or {})}
    return json_response(error.as_json(), error.status, headers)
