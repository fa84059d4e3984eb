"""The routes that tell: models, health, version, and what the controller decides."""

from __future__ import annotations

import re
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specdec.errors import InvalidRequest
from specdec.server.json_response import json_response
from specdec.server.service import Service, service_of

MAX_DECISIONS = 200  # of one explanation


async def _models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model_of(service_of(request))]})


async def _model(request: Request) -> Response:
    service = service_of(request)
    service.check_model(request.path_params["model"])
    return json_response(_model_of(service))


def _model_of(service: Service) -> dict[str, object]:
    ready = service.check_ready()
    return {
        "id": service.served_model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "specdec",
        "root": ready.model_name,
        "max_model_len": ready.max_model_len,
    }


async def _health(request: Request) -> Response:
    service_of(request).check_ready()
    return json_response({"status": "ok"})


async def _version(request: Request) -> Response:
    return json_response({"version": version("specdec-server")})


async def _speculation(request: Request) -> Response:
    """What the controller decides and why; `?last=5` asks for the newest five decisions."""
    service = service_of(request)
    last = request.query_params.get("last", "20")
    if not (re.fullmatch("[0-9]{1,3}", last) and 1 <= int(last) <= MAX_DECISIONS):
        raise InvalidRequest(
            f"last must be a whole number between 1 and {MAX_DECISIONS}", param="last"
        )
    ready = service.check_ready()
    facts = await service.engine.explain(int(last))
    return json_response({"model": service.served_model_name, "drafter": ready.drafter, **facts})


ROUTES = [
    Route("/v1/models", _models),
    Route("/v1/models/{model:path}", _model),
    Route("/health", _health),
    Route("/version", _version),
    Route("/debug/speculation", _speculation),
]
