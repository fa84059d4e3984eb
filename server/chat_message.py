"""ChatMessage: one turn of a conversation as clients send it, and as a chat template reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from specdec.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant")


class ContentPart(Struct, kw_only=True):
    """One part of a content; only `text` parts are understood."""

    type: str
    text: str | None = None


class ChatMessage(Struct, kw_only=True):
    """One turn of a conversation.

    Clients send an answer's message back as it was, so what an answer has is taken here too.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None

    def as_template(self, where: str) -> dict[str, Any]:
        """What the chat template reads; raises InvalidRequest for what it cannot show."""
        if self.role not in ROLES:
            raise InvalidRequest(
                f"{where}.role must be one of {', '.join(ROLES)}, not {self.role[:40]!r}",
                param=f"{where}.role",
            )
        for name in ("tool_calls", "tool_call_id", "function_call", "audio", "refusal"):
            if getattr(self, name):
                raise InvalidRequest(
                    f"{where}.{name} is not supported by this server", param=f"{where}.{name}"
                )
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
        content = self.content
        if isinstance(content, list):
            content = "\n".join(texts(content, f"{where}.content"))
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content or "",
            "name": self.name,
            "reasoning_content": self.reasoning_content,
        }
        return {key: value for key, value in message.items() if value is not None}


def texts(parts: Sequence[ContentPart], where: str) -> list[str]:
    """The text of each part; raises InvalidRequest naming the first that has none.

    Example: `texts([ContentPart(type="text", text="a")], "messages[0].content")` is `["a"]`.
    """
    found: list[str] = []
    for idx, part in enumerate(parts):
        if part.type != "text" or part.text is None:
            raise InvalidRequest("only text parts are supported", param=f"{where}[{idx}]")
        found.append(part.text)
    return found
