"""The HTTP application: its routes, and how errors are answered."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from specdec.errors import Overloaded, SpecdecError
from specdec.server import (
    answering,
    inspection,
    load_routes,
    openapi,
    page_routes,
    text_routes,
)
from specdec.server.json_response import error_response
from specdec.server.load_metrics import CLIENT_GONE
from specdec.server.responses import BUG, HttpError
from specdec.server.service import Service


def create_app(service: Service) -> Starlette:
    """The ASGI application of a service, without the gate before it (`guarded`).

    Example: `uvicorn.run(create_app(Service(Supervisor(), "my-model", ServerSettings())))`
    answers /health with 503 until the engine has started.
    """
    app = Starlette(
        routes=[
            *answering.ROUTES,
            *inspection.ROUTES,
            *load_routes.ROUTES,
            *page_routes.ROUTES,
            *text_routes.ROUTES,
            *openapi.ROUTES,
        ],
        exception_handlers={
            SpecdecError: _answer_error,
            HTTPException: _answer_http_exception,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_bug,
        },
    )
    app.router.redirect_slashes = False  # it would answer with whatever Host the client sent
    app.state.service = service
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecdecError)
    headers = None
    if isinstance(error, Overloaded):
        headers = {"Retry-After": str(error.retry_after_s)}
    return error_response(HttpError.of(error), headers)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
    body = HttpError(
        error.status_code,
        error.detail,
        "invalid_request_error",
        code=code.get(error.status_code),
    )
    return error_response(body, dict(error.headers or {}))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)  # a log may show it


async def _answer_bug(request: Request, error: Exception) -> Response:
    return error_response(BUG)
