"""Script: a prompt that tells the scripted engine what to answer, and how."""

from __future__ import annotations

import json
from typing import Any


def script(text: str, **directives: object) -> str:
    """A prompt that is answered with `text`; scripted_engine.py has the directives.

    Example: `script("Hello", burst=2)` is answered two tokens a step.
    """
    return f"[[{json.dumps(directives)}]]{text}"


def say(text: str, **directives: object) -> list[dict[str, str]]:
    """The messages of a chat that is answered with `text`."""
    return [{"role": "user", "content": script(text, **directives)}]


def chat(text: str, **directives: object) -> dict[str, Any]:
    """The body of a chat that is answered with `text`."""
    return {"model": "toy", "messages": say(text, **directives)}
