"""Wrong types: every field of both bodies is refused in short, and the next request is served."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import inspect

from specdec.server.chat_message import ChatMessage, ContentPart
from specdec.server.protocol import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    Prediction,
    Speculation,
    StreamOptions,
    TokenInfoOptions,
)
from specdec.server.unsupported import UNSUPPORTED

if TYPE_CHECKING:
    from tests.server.conftest import RunningServer

CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "[[{}]]a"}]}
COMPLETION: dict[str, Any] = {"model": "toy", "prompt": "[[{}]]a"}
BODIES: dict[type[GenerationBody], tuple[str, dict[str, Any]]] = {
    ChatBody: ("/v1/chat/completions", CHAT),
    CompletionBody: ("/v1/completions", COMPLETION),
}
# As JSON, since Python could not write some of them.
VALUES = [
    *("true", "-1", "1.5", "-0.0", "1e308", "9" * 400, str(2**63), '"x"', '""'),
    *("[]", "{}", "[[]]", "[null]", "[-1]", '["x"]', '{"x": null}', '{"type": "content"}'),
    '"' + "x" * 5000 + '"',
    '"\\u0000"',
    '"../../etc/passwd\\n"',
]
NESTED: dict[str, tuple[type, dict[str, Any]]] = {
    "stream_options": (StreamOptions, {}),
    "speculation": (Speculation, {}),
    "token_info": (TokenInfoOptions, {}),
    "prediction": (Prediction, {"type": "content", "content": "a"}),
}


def names(kind: type) -> list[str]:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return [field.encode_name for field in found.fields]


def with_field(body: dict[str, Any], name: str, value: str) -> bytes:
    rest = {key: body[key] for key in body if key != name}
    return json.dumps(rest)[:-1].encode() + f', "{name}": {value}}}'.encode()


def check(server: RunningServer, path: str, body: bytes) -> int:
    """Either an answer or a refusal in short."""
    answer = server.request("POST", path, body)
    if answer.status == 200:
        return 200
    assert answer.status == (404 if answer.json["error"]["code"] == "model_not_found" else 400)
    assert len(answer.text) < 1024
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return answer.status


def check_next(server: RunningServer, kind: type[GenerationBody]) -> None:
    path, body = BODIES[kind]
    assert server.post(path, body).status == 200


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in BODIES for name in [*names(kind), *sorted(UNSUPPORTED)]],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_field_of_any_type(server: RunningServer, kind: type[GenerationBody], name: str) -> None:
    path, body = BODIES[kind]
    seen = {check(server, path, with_field(body, name, value)) for value in VALUES}
    assert seen & {400, 404}, "some of these are wrong for any field"
    check_next(server, kind)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", NESTED)
def test_a_nested_field_of_any_type(
    server: RunningServer, kind: type[GenerationBody], name: str
) -> None:
    path, body = BODIES[kind]
    nested, good = NESTED[name]
    for inner in names(nested):
        seen = {
            check(server, path, with_field(body, name, with_field(good, inner, value).decode()))
            for value in VALUES
            if good
        } or {check(server, path, with_field(body, name, f'{{"{inner}": {v}}}')) for v in VALUES}
        assert 400 in seen
    check_next(server, kind)


def test_a_message_of_any_type(server: RunningServer) -> None:
    for value in VALUES:
        check(server, BODIES[ChatBody][0], with_field(CHAT, "messages", f"[{value}]"))
    good = CHAT["messages"][0]
    for name in names(ChatMessage):
        for value in VALUES:
            message = with_field(good, name, value).decode()
            check(server, BODIES[ChatBody][0], with_field(CHAT, "messages", f"[{message}]"))
    for name in names(ContentPart):
        for value in VALUES:
            part = with_field({"type": "text", "text": "a"}, name, value).decode()
            message = with_field(good, "content", f"[{part}]").decode()
            check(server, BODIES[ChatBody][0], with_field(CHAT, "messages", f"[{message}]"))
    check_next(server, ChatBody)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_a_body_of_ten_megabytes(server: RunningServer, kind: type[GenerationBody]) -> None:
    path, body = BODIES[kind]
    long = '"' + "x" * 10_000_000 + '"'
    for name in ("user", "unknown", "stop", "model", "tools", "prompt", "messages"):
        check(server, path, with_field(body, name, long))
    check(server, path, with_field(body, "prompt", "[" + "1," * 3_000_000 + "1]"))
    check_next(server, kind)
