"""Gate: what every HTTP request passes before it comes to a route."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from specdec.server.access_log import AccessLogMiddleware
from specdec.server.api_keys import ApiKeyMiddleware
from specdec.server.body_limit import BodyLimitMiddleware
from specdec.server.foreign_page import ForeignPageMiddleware
from specdec.server.load_metrics import CountingMiddleware
from specdec.server.rate_limit import RateLimitMiddleware
from specdec.server.request_id import RequestIdMiddleware
from specdec.server.service import Service
from specdec.server.tracing import traced


def guarded(app: ASGIApp, service: Service) -> ASGIApp:
    """The application behind its gate, from the inside out.

        body limit    length and pace of what a client sends
        rate limit    requests per minute, by key or address
        API keys      everything but /health
        foreign page  what pages of other sites make a browser send
        CORS          whose pages may ask; before keys, since preflights carry none
        request id    on every answer, also on the refusals of what is listed above
        traces        a span for every generation, where the environment asks for them
        counts        of every answer, by route and status
        access log    a line for every answer

    Example: `uvicorn.run(guarded(create_app(service), service))`.
    """
    settings = service.settings
    app = BodyLimitMiddleware(app, settings)
    app = RateLimitMiddleware(app, settings.rate_limit)
    app = ApiKeyMiddleware(app, settings.api_keys)
    app = ForeignPageMiddleware(app, settings.cors_origins)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send a dozen of x-stainless-*, and more to come
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app = traced(RequestIdMiddleware(app), service.served_model_name)
    app = CountingMiddleware(app, service.load)
    return AccessLogMiddleware(app) if settings.access_log else app
