"""Cases: what every client asks of the server, and what it must see for an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import ANY

Json = dict[str, Any]

SENTENCE = "The quick brown fox jumps over the lazy dog."
# Two to four bytes to a character, joined and combined ones, and what some take for an end of line.
UNICODE = (
    "na\u00efve cafe\u0301 \u65e5\u672c\u8a9e \U0001f642 \U0001f469\u200d\U0001f469\u200d\U0001f467"
    " \u2028\u0085| \U0001f1e9\U0001f1ea."
)
KEY = "a-secret"  # of the server at the place "busy"
END_LEN = 1  # the end-of-sequence token counts as output


@dataclass(frozen=True)
class Refusal:
    """An error as a client must see it; `message` is a part of its message."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True)
class Case:
    """One request. `body` holds OpenAI's fields and `extra` this server's own.

    The engine is told by the prompt to say `text`; `said` is what of it the client must see. A
    refusal comes instead of an answer, one `in_stream` after the part of the text in `said`.
    """

    name: str
    text: str = SENTENCE
    said: str | None = None
    finish: str = "stop"
    directives: Json = field(default_factory=lambda: {"burst": 4})
    body: Json = field(default_factory=dict)
    extra: Json = field(default_factory=dict)
    history: tuple[Json, ...] = ()
    usage: bool = True  # streams ask for it too
    prediction: tuple[int, int] | None = None  # accepted and rejected tokens of it
    refusal: Refusal | None = None
    in_stream: bool = False
    place: str = "ready"  # or "loading", "busy", or "retry": loading at first, ready then
    key: str = "none"
    cancels: bool = False

    @property
    def prompt(self) -> str:
        return f"[[{json.dumps(self.directives)}]]{self.text}"

    @property
    def messages(self) -> list[Json]:
        return [*self.history, {"role": "user", "content": self.prompt}]

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt: the test model's template, one token to a byte."""
        turns = "".join(f"{turn['role']}:{_text(turn['content'])}\n" for turn in self.messages)
        return len(f"{turns}assistant:".encode())

    @property
    def num_output(self) -> int:
        """Output tokens of one choice: stop strings and limits end it, else the end does."""
        said = len((self.text if self.said is None else self.said).encode())
        if "stop" in self.body:
            return said + len(self.body["stop"][0])
        return said if self.finish == "length" else said + END_LEN

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))

    def expected(self, *, streams: bool) -> Json:
        """What a client must see, but for the text of an error's message."""
        said = self.text if self.said is None else self.said
        if self.refusal is not None:
            in_stream = streams and self.in_stream
            return {
                "texts": [said] if in_stream else [],
                "finish": [],
                "usage": None,
                "prediction": None,
                "logprobs": None,
                "error.status": ANY
                if in_stream
                else self.refusal.status,  # each client invents one
                "error.code": self.refusal.code,
                "error.param": self.refusal.param,
            }
        num_output = self.num_output * self.num_choices
        usage = [self.num_prompt, num_output, self.num_prompt + num_output]
        return {
            "texts": [said] * self.num_choices,
            "finish": [self.finish] * self.num_choices,
            "usage": usage if self.usage or not streams else None,
            "prediction": None if self.prediction is None else list(self.prediction),
            "logprobs": self._logprobs() if self.body.get("logprobs") else None,
            "error.status": None,
            "error.code": None,
            "error.param": None,
        }

    def _logprobs(self) -> list[Json]:
        """The scripted engine finds each token likely and its neighbour in the alphabet next."""
        said = self.text if self.said is None else self.said
        return [
            {"token": char, "logprob": -0.5, "top": [[char, -0.5], [chr(ord(char) + 1), -1.5]]}
            for char in said
        ]


CASES = (
    Case("chat", usage=False),
    Case("usage"),
    Case("empty", text=""),
    Case(
        "conversation",
        history=(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Say something."}]},
            {"role": "assistant", "content": "Something."},
        ),
    ),
    # Slow enough for the server to send each step on its own: characters fall apart over chunks.
    Case("unicode", text=UNICODE, directives={"burst": 3, "delay_s": 0.004}),
    Case("token by token", text=UNICODE, extra={"stream_interval": "token"}),
    Case("stop", said="The quick brown fox ", body={"stop": ["jumps"]}, directives={"burst": 7}),
    Case("length", said="The quick", finish="length", body={"max_tokens": 9}),
    Case("choices", body={"n": 2}),
    Case(
        "logprobs",
        text="abcdefgh",
        finish="length",
        body={"logprobs": True, "top_logprobs": 2, "max_tokens": 8},
        directives={"burst": 3},
    ),
    # 44 characters and the end in steps of 4: 12 steps draft 3 each and accept 33 of them.
    Case(
        "prediction",
        body={"prediction": {"type": "content", "content": SENTENCE}},
        prediction=(33, 3),
    ),
    Case("extra", extra={"top_k": 7, "speculation": {"max_nodes": 3}}),
    Case(
        "no model",
        body={"model": "other"},
        refusal=Refusal(404, "'other'", "model_not_found", "model"),
    ),
    Case(
        "bad field",
        body={"temperature": -1},
        refusal=Refusal(400, "temperature", param="temperature"),
    ),
    Case("bad extra", extra={"top_k": -5}, refusal=Refusal(400, "top_k", param="top_k")),
    Case(
        "too long",
        body={"max_tokens": 5000},
        refusal=Refusal(400, "do not fit", "context_length_exceeded", "max_tokens"),
    ),
    Case("loading", place="loading", refusal=Refusal(503, "loading", "overloaded")),
    Case("busy", place="busy", key=KEY, refusal=Refusal(503, "queue is full", "overloaded")),
    Case("wrong key", place="busy", key="x", refusal=Refusal(401, "API key", "invalid_api_key")),
    Case("retry", place="retry"),
    Case(
        "mid-stream error",
        said="The quick",
        directives={"die": "request", "die_after": 9, "delay_s": 0.01},
        refusal=Refusal(500, "logits are not finite"),
        in_stream=True,
    ),
    Case(
        "cancel",
        directives={"end": False, "delay_s": 0.01},
        body={"max_tokens": 1500},
        cancels=True,
    ),
)


def _text(content: str | list[Json]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
