"""OpenAPI: the document has every route, and every answer is as the document says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from specdec.server import answer_shapes as shapes
from specdec.server.app import create_app
from specdec.server.openapi import OPERATIONS, Operation, document
from specdec.server.service import Service
from specdec.server.settings import ServerSettings
from specdec.server.supervisor import Supervisor
from specdec.server.text_routes import Detokenized, Tokenized
from tests.server.conftest import RunningServer

CHAT = {"model": "toy", "messages": [{"role": "user", "content": '[[{"burst": 3}]]Hello'}]}
TEXT = {"model": "toy", "prompt": '[[{"burst": 3}]]Hello'}
EVERYTHING = {
    "n": 2,
    "token_info": {"rejected": True},
    "return_token_ids": True,
    "prediction": {"type": "content", "content": "Hello"},
    "max_tokens": 9,
}
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}


def test_the_document_has_every_route_and_no_other() -> None:
    app = create_app(Service(Supervisor(), "toy", ServerSettings()))
    routes = {
        (route.path.replace(":path}", "}"), method.lower())  # type: ignore[attr-defined]  # all routes here have these
        for route in app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]  # all routes here have these
    }
    paths = document()["paths"]
    assert {(path, method) for path in paths for method in paths[path]} == routes


def test_keys_and_limits_are_told_where_there_are_any(
    own_server: Callable[..., RunningServer],
) -> None:
    plain, keyed = document(), document(has_keys=True, has_rate_limit=True)
    assert "security" not in plain
    assert keyed["security"] == [{"key": []}, {"password": []}]
    assert set(keyed["components"]["securitySchemes"]) == {"key", "password"}
    assert keyed["paths"]["/health"]["get"]["security"] == []
    chat = keyed["paths"]["/v1/chat/completions"]["post"]["responses"]
    plain_chat = plain["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(chat) - set(plain_chat) == {"401", "403", "429"}
    running = own_server(api_keys=("secret",))
    running.wait_ready()
    answer = running.get("/openapi.json", authorization="Bearer secret")
    assert answer.json["security"] == keyed["security"]


def test_every_reference_leads_somewhere() -> None:
    found = document()
    names = set(found["components"]["schemas"])
    text = json.dumps(found)
    references = {part.split('"', 1)[0] for part in text.split("#/components/schemas/")[1:]}
    assert references == names, "each schema is used, and each that is used is there"


ANSWERS: list[tuple[str, str, dict[str, Any] | None, type]] = [
    ("POST", "/v1/chat/completions", CHAT, shapes.ChatAnswer),
    ("POST", "/v1/chat/completions", CHAT | EVERYTHING | LOGPROBS, shapes.ChatAnswer),
    ("POST", "/v1/completions", TEXT, shapes.CompletionAnswer),
    ("POST", "/v1/completions", TEXT | EVERYTHING | {"logprobs": 2}, shapes.CompletionAnswer),
    ("POST", "/v1/completions", TEXT | {"model": "other"}, shapes.ErrorBody),
    ("POST", "/tokenize", {"prompt": "a", "return_token_strs": True}, Tokenized),
    ("POST", "/tokenize", {"content": "é", "with_pieces": True}, Tokenized),
    ("POST", "/detokenize", {"tokens": [1]}, Detokenized),
    ("GET", "/v1/models", None, shapes.Models),
    ("GET", "/health", None, shapes.Health),
    ("GET", "/version", None, shapes.Version),
    ("GET", "/debug/load", None, shapes.Load),
    ("GET", "/debug/speculation", None, shapes.Speculation),
    ("GET", "/debug/speculation?last=x", None, shapes.ErrorBody),
    ("GET", "/nowhere", None, shapes.ErrorBody),
]


@pytest.mark.parametrize(("method", "path", "body", "shape"), ANSWERS)
def test_answers_have_the_shape_that_the_document_gives_them(
    server: RunningServer, method: str, path: str, body: dict[str, Any] | None, shape: type
) -> None:
    answer = server.request(method, path, body)
    msgspec.json.decode(answer.text, type=shape)


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        ("/v1/chat/completions", CHAT | USAGE, shapes.ChatChunk),
        ("/v1/chat/completions", CHAT | USAGE | EVERYTHING | LOGPROBS, shapes.ChatChunk),
        ("/v1/completions", TEXT | USAGE, shapes.CompletionChunk),
        ("/v1/completions", TEXT | USAGE | EVERYTHING | {"logprobs": 2}, shapes.CompletionChunk),
    ],
)
def test_events_have_the_shape_that_the_document_gives_them(
    server: RunningServer, path: str, body: dict[str, Any], shape: type
) -> None:
    answer = server.post(path, body)
    declared = document()["paths"][path]["post"]["responses"]["200"]["content"]
    assert answer.headers["content-type"].partition(";")[0] in declared
    *chunks, done = answer.events
    assert done == "[DONE]"
    for chunk in chunks:
        msgspec.convert(chunk, shape)


# What a schema cannot say: the model's name, and fields that depend on one another.
VALID = {"model": "toy", "best_of": None, "chat_template": None, "continue_final_message": None}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
NUM_EXAMPLES = 30  # of each operation and mode


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_what_a_stranger_sends_is_answered_as_the_document_says(
    server: RunningServer, operation: Operation, mode: GenerationMode
) -> None:
    """Bodies and parameters as the schema has them, then as it has them not."""
    schema = schemathesis.openapi.from_dict(document())
    api = schema[operation.path][operation.method.upper()]
    has_choice = operation.body is not None or operation.parameters
    has_wrong = operation.body is not None or any(p["in"] == "query" for p in operation.parameters)
    if mode == GenerationMode.NEGATIVE and not has_wrong:
        return  # nothing to be wrong about

    @settings(
        max_examples=NUM_EXAMPLES if has_choice else 1,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=api.as_strategy(mode))
    def ask(case: Any) -> None:
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body |= VALID
            if "messages" in case.body:
                case.body["messages"] = case.body["messages"] and CHAT["messages"]
        response = case.call(base_url=server.url, timeout=20)
        case.validate_response(response, checks=CHECKS)

    ask()
