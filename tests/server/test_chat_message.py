"""Messages of a chat: what a template is given, and what is refused by its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.errors import InvalidRequest
from specdec.server.parsing import parse_body
from specdec.server.protocol import ChatBody

TEXT = {"type": "text", "text": "a"}


def shown(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    raw = json.dumps({"model": "m", "messages": messages}).encode()
    return parse_body(raw, ChatBody).template_messages()


def test_what_a_template_reads() -> None:
    assert shown(
        {"role": "developer", "content": [TEXT, TEXT]},
        {"role": "user", "content": "b", "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant"},
        {"role": "assistant", "content": "c", "refusal": None, "annotations": []},
        {"role": "assistant", "content": "d", "reasoning_content": "e"},
        {"role": "user", "content": ""},
    ) == [
        {"role": "system", "content": "a\na"},
        {"role": "user", "content": "b", "name": "n"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "e"},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        *[({"role": role, "content": "a"}, "role") for role in ("tool", "function", "User", "")],
        ({"role": "x" * 5000, "content": "a"}, "role"),
        *[({"role": role, "content": None}, "content") for role in ("user", "system")],
        ({"role": "user"}, "content"),
        ({"role": "user", "content": [TEXT, {"type": "image_url"}]}, "content[1]"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "assistant", "audio": {"id": "a"}}, "audio"),
        ({"role": "user", "content": "a", "tool_call_id": "1"}, "tool_call_id"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_its_place(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shown({"role": "user", "content": "a"}, message)
    assert caught.value.param == f"messages[1].{param}"
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_a_conversation_is_not_empty() -> None:
    with pytest.raises(InvalidRequest, match="must not be empty"):
        shown()
