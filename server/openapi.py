"""OpenAPI: the document at /openapi.json, made from the structs that parse bodies and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specdec.server import answer_shapes as shapes
from specdec.server import page_routes
from specdec.server.inspection import MAX_DECISIONS
from specdec.server.json_response import json_response
from specdec.server.protocol import ChatBody, CompletionBody
from specdec.server.service import service_of
from specdec.server.text_routes import DetokenizeBody, Detokenized, TokenizeBody, Tokenized

Json = dict[str, Any]
JSON, EVENTS = "application/json", "text/event-stream"
REFERENCE = "#/components/schemas/{name}"
ANY_ROUTE = (408, 413, 431, 500)  # a request that is too slow or too long, and our own bugs
WITH_BODY = (400, 404)  # 404: another model
ENGINE = (503,)
DESCRIPTION = (
    "OpenAI-compatible, with speculative decoding. Fields of a request that are not listed are "
    "ignored; those that other servers know and this one cannot honour are refused with 400."
)


@dataclass(frozen=True)
class Operation:
    """One method of one path; `answers` are the types of success by content type, None for text."""

    path: str
    summary: str
    answers: Mapping[str, type | None]
    body: type | None = None
    chunk: type | None = None  # of what is streamed
    errors: tuple[int, ...] = ()
    parameters: tuple[Json, ...] = ()
    is_open: bool = False  # needs no key
    statuses: tuple[int, ...] = field(default=())  # further ones, without a body

    @property
    def method(self) -> str:
        return "get" if self.body is None else "post"


LAST = {
    "name": "last",
    "in": "query",
    "description": "how many of the newest decisions",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_DECISIONS, "default": 20},
}
MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "Answer a chat",
        {JSON: shapes.ChatAnswer, EVENTS: None},
        ChatBody,
        shapes.ChatChunk,
        (*WITH_BODY, *ENGINE, 504),
    ),
    Operation(
        "/v1/completions",
        "Complete a text",
        {JSON: shapes.CompletionAnswer, EVENTS: None},
        CompletionBody,
        shapes.CompletionChunk,
        (*WITH_BODY, *ENGINE, 504),
    ),
    Operation(
        "/tokenize",
        "Text or messages to token ids",
        {JSON: Tokenized},
        TokenizeBody,
        errors=(*WITH_BODY, *ENGINE),
    ),
    Operation(
        "/detokenize",
        "Token ids to text",
        {JSON: Detokenized},
        DetokenizeBody,
        errors=(*WITH_BODY, *ENGINE),
    ),
    Operation("/v1/models", "The model that is served", {JSON: shapes.Models}, errors=ENGINE),
    Operation(
        "/v1/models/{model}",
        "The model of this name",
        {JSON: shapes.Model},
        errors=(404, *ENGINE),
        parameters=(MODEL,),
    ),
    Operation(
        "/health",
        "Whether requests are served",
        {JSON: shapes.Health},
        errors=ENGINE,
        is_open=True,
    ),
    Operation("/version", "The server's version", {JSON: shapes.Version}),
    Operation("/metrics", "Counters for Prometheus", {"text/plain": None}),
    Operation("/debug/load", "How the server does", {JSON: shapes.Load}),
    Operation(
        "/debug/speculation",
        "What the controller decides and why",
        {JSON: shapes.Speculation},
        errors=(400, *ENGINE),
        parameters=(LAST,),
    ),
    Operation("/openapi.json", "This document", {JSON: None}),
)


def _page_operations() -> Iterator[Operation]:
    for file in page_routes.page_files():
        content_type = file.content_type.partition(";")[0]
        yield Operation(file.path, "A file of the page", {content_type: None}, statuses=(304,))


@cache
def document(*, has_keys: bool = False, has_rate_limit: bool = False) -> Json:
    """The OpenAPI 3.1 document of this server; its security is listed if it asks for keys.

    Example: `document()["paths"]["/v1/chat/completions"]["post"]["requestBody"]`.
    """
    operations = (*OPERATIONS, *_page_operations())
    types = {kind: None for item in operations for kind in _types(item)} | {shapes.ErrorBody: None}
    references, schemas = msgspec.json.schema_components(types, ref_template=REFERENCE)
    reference = dict(zip(types, references, strict=True))
    paths: dict[str, Json] = {}
    for item in operations:
        errors = [*item.errors, *ANY_ROUTE]
        if has_keys and not item.is_open:
            errors += [401, 403]
        if has_rate_limit and item.body is not None:
            errors.append(429)
        paths[item.path] = {item.method: _operation(item, sorted(errors), reference)}
    components: Json = {"schemas": schemas}
    found: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "specdec",
            "version": version("specdec-server"),
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "password": {
                "type": "http",
                "scheme": "basic",
                "description": "the key is the password",
            },
        }
        found["security"] = [{"key": []}, {"password": []}]
    return found


def _types(item: Operation) -> list[type]:
    found = (item.body, item.chunk, *item.answers.values())
    return [kind for kind in found if kind is not None]


def _operation(item: Operation, errors: list[int], reference: Mapping[type, Json]) -> Json:
    content = {
        media: {"schema": _schema(item, media, kind, reference)}
        for media, kind in item.answers.items()
    }
    answers: Json = {"200": {"description": "success", "content": content}}
    for status in item.statuses:
        answers[str(status)] = {"description": HTTPStatus(status).phrase}
    for status in errors:
        answers[str(status)] = _error(status, reference[shapes.ErrorBody])
    words = item.path.strip("/").replace(".", "/").split("/")
    operation: Json = {
        "operationId": "_".join([item.method, *filter(None, words)]),
        "summary": item.summary,
        "responses": answers,
    }
    if item.parameters:
        operation["parameters"] = list(item.parameters)
    if item.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": reference[item.body]}},
        }
    if item.is_open:
        operation["security"] = []
    return operation


def _schema(item: Operation, media: str, kind: type | None, reference: Mapping[type, Json]) -> Json:
    if kind is not None:
        return reference[kind]
    if media != EVENTS:
        return {"type": "object"} if media == JSON else {"type": "string"}
    assert item.chunk is not None
    data = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": [reference[item.chunk], reference[shapes.ErrorBody]]},
    }
    return {
        "type": "object",
        "description": "One event; the data of the last is [DONE]. "
        "An error after the start is an event too.",
        "properties": {"data": data},
        "required": ["data"],
    }


def _error(status: int, schema: Json) -> Json:
    answer: Json = {
        "description": HTTPStatus(status).phrase,
        "content": {JSON: {"schema": schema}},
    }
    if status in (429, 503):
        answer["headers"] = {
            "Retry-After": {"description": "seconds", "schema": {"type": "integer"}}
        }
    return answer


async def _openapi(request: Request) -> Response:
    settings = service_of(request).settings
    found = document(has_keys=bool(settings.api_keys), has_rate_limit=bool(settings.rate_limit))
    return json_response(found)


ROUTES = [Route("/openapi.json", _openapi)]
