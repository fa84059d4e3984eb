"""Page routes: the chat page at /, the dashboard at /dashboard, their files at /page."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PLACES = {"index.html": "/", "dashboard.html": "/dashboard"}  # all other files: /page/NAME
HEADERS = {
    "Cache-Control": "no-cache",  # keep it, but ask whether it is still the same
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " object-src 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFile:
    """One file of the page, in memory; answers GET and HEAD.

    Example: `PageFile(FOLDER / "index.html").content_type` is "text/html; charset=utf-8".
    """

    def __init__(self, file: Path) -> None:
        self.path = PLACES.get(file.name, f"/page/{file.name}")
        self.content = file.read_bytes()
        self.content_type = CONTENT_TYPES[file.suffix]
        self.etag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    async def answer(self, request: Request) -> Response:
        """The file, or 304 where the browser has it already."""
        headers = {**HEADERS, "ETag": self.etag}
        known = request.headers.get("If-None-Match", "")
        if self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        # Not by media_type: starlette would add a charset of its own.
        return Response(self.content, headers={**headers, "Content-Type": self.content_type})


def page_files() -> list[PageFile]:
    """Every file of the page: what a request names never reaches the file system."""
    return [PageFile(file) for file in sorted(FOLDER.iterdir()) if file.suffix in CONTENT_TYPES]


ROUTES = [Route(file.path, file.answer, methods=["GET"]) for file in page_files()]
