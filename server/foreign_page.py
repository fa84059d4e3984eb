"""ForeignPageMiddleware: pages of other sites may not use a browser's password or start work."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.server.json_response import error_response
from specdec.server.responses import HttpError

_REFUSAL = HttpError(
    403,
    "a page of another site may not ask this server; allow it with --cors-origin",
    "permission_error",
)
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class ForeignPageMiddleware:
    """Refuses with 403 what a page of another site makes a browser send on its own authority.

    A browser adds the password it knows to such requests, and a server without keys asks for none.
    Programs send neither Origin nor Sec-Fetch-Site and are not touched, nor is a request with a
    bearer key, which no page can send without being told it. A link to a page of ours is fine.
    """

    def __init__(self, app: ASGIApp, allowed_origins: tuple[str, ...]) -> None:
        self.app = app
        self._allowed = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_refused(scope):
            await error_response(_REFUSAL)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_refused(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        authorization = headers.get("authorization", "").lower()
        if authorization.startswith("bearer "):
            return False
        origin = headers.get("origin")
        if "*" in self._allowed or origin in self._allowed or not is_foreign(headers):
            return False
        if scope["method"] in SAFE_METHODS:  # these change nothing; only a password makes them tell
            is_link = headers.get("sec-fetch-mode") == "navigate"
            return bool(authorization) and not is_link
        return True


def is_foreign(headers: Headers) -> bool:
    """Whether a browser says that the page which asks is not this server's own.

    Over plain http browsers may tell only the Origin, which is "null" for a page without one.

    Example: Host "a:8000" with Origin "http://b" is foreign, with "http://a:8000" it is not.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:  # it knows better than a Host that a proxy may have changed
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host", "")
