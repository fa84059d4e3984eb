"""Parsing: bytes that are no body are refused in short, and unknown fields where that is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.errors import InvalidRequest
from specdec.server.parsing import parse_body, parse_struct
from specdec.server.protocol import ChatBody, CompletionBody, GenerationBody, StreamOptions
from specdec.server.responses import HttpError
from specdec.server.sse import to_json

KINDS: list[type[GenerationBody]] = [ChatBody, CompletionBody]
GOOD: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    "prompt": "a",
}

BROKEN = [
    b"",
    b" ",
    b"{",
    b"[]",
    b"null",
    b'"a"',
    b'{"model": "m"} {"model": "m"}',
    b"{'model': 'm'}",
    b'{"temperature": NaN}',
    b'{"temperature": Infinity}',
    b'{"temperature": -Infinity}',
    b'{"temperature": 1e999}',
    b'{"unknown": NaN}',
    b'{"unknown": 1e999}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"unknown": ' + b"9" * 5000 + b"}",
    b'{"user": "\xff"}',
    b'{"unknown": "\xff"}',
    b'{"user": "\\ud800"}',
    b'{"unknown": "\\ud800"}',
    b'{"\\udc00": 1}',
    b'{"user": "\x00"}',
    b'\xef\xbb\xbf{"user": "u"}',
    '{"user": "u"}'.encode("utf-16"),
    b'{"user": "a", "user": "b"}',
    b'{"unknown": {"a": 1, "a": 1}}',
    b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"tools": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    b"[" * 100_000,
]


def complete(raw: bytes) -> bytes:
    """The raw object with the fields that a body must have, so that only its fault is left."""
    if not raw.startswith((b'{"', b"\xef\xbb\xbf{")) or raw.count(b'"model"'):
        return raw
    head, _, tail = raw.partition(b"{")
    return head + b"{" + json.dumps(GOOD).encode()[1:-1] + b", " + tail


@pytest.mark.parametrize("raw", BROKEN, ids=lambda raw: raw[:30].decode(errors="replace"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_body_is_refused_in_short(raw: bytes, kind: type[GenerationBody]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(complete(raw), kind)
    error = HttpError.of(caught.value)
    assert error.status == 400
    assert len(to_json(error.as_json())) < 1024


def test_what_is_completed_is_good_but_for_its_fault() -> None:
    for kind in KINDS:
        parse_body(complete(b'{"user": "u"}'), kind)


@pytest.mark.parametrize("text", ["\x01" * 5000, "\U0001f600" * 5000, "\u2028x" * 5000])
def test_what_a_client_sent_comes_back_in_short(text: str) -> None:
    error = HttpError.of(InvalidRequest(text, param=text))
    assert 100 < len(to_json(error.as_json())) < 1024


def test_a_key_that_comes_twice_is_named() -> None:
    with pytest.raises(InvalidRequest, match="'temperature' more than once") as caught:
        parse_body(complete(b'{"temperature": 0, "temperature": 1}'), ChatBody)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"stream_options": {"include": True}}, "stream_options.include"),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "y": 1}]}]},
            "messages[0].content[0].y",
        ),
        ({"prediction": {"type": "content", "content": "a", "z": 1}}, "prediction.z"),
        ({"x" * 500: 1}, "x" * 64),
    ],
)
def test_unknown_fields_are_refused_where_that_is_asked(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "messages": GOOD["messages"], **fields}
    raw = json.dumps(body).encode()
    parse_body(raw, ChatBody)
    with pytest.raises(InvalidRequest) as caught:
        parse_body(raw, ChatBody, strict=True)
    assert caught.value.param == param


def test_strict_takes_what_is_known() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
    }
    body = {
        "model": "m",
        "messages": [*GOOD["messages"], {**answer, "tool_calls": None, "function_call": None}],
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "chat_template_kwargs": {"anything": {"goes": 1}},
        "metadata": {"a": "b"},
        "logit_bias": {"5": 1},
        "tools": [],
        "tool_choice": None,
        "guided_json": None,
        "token_info": {"rejected": True},
        "speculation": {"max_nodes": 3},
    }
    parse_body(json.dumps(body).encode(), ChatBody, strict=True)


def test_other_bodies_are_parsed_alike() -> None:
    assert parse_struct(b'{"include_usage": true}', StreamOptions).include_usage
    for raw, strict in ((b'{"include_usage": 1}', False), (b"[]", False), (b'{"x": 1}', True)):
        with pytest.raises(InvalidRequest):
            parse_struct(raw, StreamOptions, strict=strict)
