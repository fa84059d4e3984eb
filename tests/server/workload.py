"""Workload: requests of every kind for the toy engine, sent as clients send them, and what came."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPResponse
from typing import Any

from tests.server.conftest import RunningServer

MAX_TOKENS = 48
MAX_CHOICES = 2
NUM_TOP = 5  # logprobs beside each token's own
TEXT = "the cat sat on the mat and the cat sat on the hat "
Json = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One request's endpoint and fields. Its seed makes the answer a function of the fields."""

    path: str
    fields: Json = field(hash=False)

    @classmethod
    def draw(cls, number: int) -> Job:
        """The number-th job: always the same for the same number, and all kinds before long."""
        draw = random.Random(number)
        start = draw.randrange(len(TEXT))
        prompt = (TEXT[start:] + TEXT)[: draw.randrange(8, 160)] * 2
        is_chat = number % 2 == 0
        fields: Json = {
            "model": "toy",
            "seed": number,
            "max_tokens": draw.randrange(4, MAX_TOKENS + 1),
            "temperature": draw.choice([0, 0.7, 1]),
            "top_p": draw.choice([1, 0.9]),
            "top_k": draw.choice([0, 40]),
            "n": draw.randrange(1, MAX_CHOICES + 1),
            "logit_bias": draw.choice([{}, {"65": 9, "66": 9}]),  # what recurs is drafted
            "presence_penalty": draw.choice([0, 0.5]),
            "frequency_penalty": draw.choice([0, 0.5]),
            "repetition_penalty": draw.choice([1, 1.1]),
        }
        if is_chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if draw.random() < 0.3:
            fields["stop"] = [draw.choice("abc"), "no such text"]
        if draw.random() < 0.3:
            both = {"logprobs": True, "top_logprobs": NUM_TOP}
            fields.update(both if is_chat else {"logprobs": NUM_TOP})
        if draw.random() < 0.3:
            fields["prediction"] = {"type": "content", "content": TEXT}
        if draw.random() < 0.3:
            fields["speculation"] = {"max_nodes": draw.randrange(9)}
        return cls("/v1/chat/completions" if is_chat else "/v1/completions", fields)

    def with_fields(self, **fields: Any) -> Job:
        """The same request, asked for in another way."""
        return replace(self, fields={**self.fields, **fields})

    def send(self, server: RunningServer) -> Outcome:
        """Ask, read to the end and say what came."""
        with _post(server, self) as response:
            if response.status != 200:
                return Outcome(error=f"{response.status} {response.read().decode()}")
            if self.fields.get("stream"):
                return _gather(self, response)
            answer = json.loads(response.read())
            found = [_choice(choice) for choice in answer["choices"]]
            return Outcome(found, answer["usage"]["completion_tokens"])

    def abandon(self, server: RunningServer, num_lines: int) -> None:
        """Ask for a stream, read a few lines of it, and go."""
        with _post(server, self.with_fields(stream=True)) as response:
            for _ in range(num_lines):
                response.readline()


@dataclass
class Outcome:
    """What a client has of an answer; `error` is what it was told instead, or "" """

    choices: list[Json] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""


@contextmanager
def _post(server: RunningServer, job: Job) -> Iterator[HTTPResponse]:
    """A request on a connection of its own, which closes with it."""
    connection = server.connect()
    try:
        connection.request("POST", job.path, json.dumps(job.fields).encode())
        yield connection.getresponse()
    finally:
        connection.close()


def _gather(job: Job, response: HTTPResponse) -> Outcome:
    """A stream put together; its pieces must make the whole answer."""
    count = job.fields["n"]
    outcome = Outcome([{"text": "", "finish": None, "logprobs": []} for _ in range(count)])
    for event in _events(response):
        if "error" in event:
            return Outcome(error=json.dumps(event))
        for piece in event["choices"]:
            choice, found = outcome.choices[piece["index"]], _choice(piece)
            choice["text"] += found["text"]
            choice["logprobs"] += found["logprobs"]
            if choice["finish"] is not None:
                return Outcome(error=f"a choice goes on after its end: {event}")
            choice["finish"] = found["finish"]
        if event.get("usage"):
            outcome.num_tokens = event["usage"]["completion_tokens"]
    return outcome


def _events(response: HTTPResponse) -> Iterator[Json]:
    last = b""
    for line in response:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield json.loads(line.removeprefix(b"data: "))
        last = line if line.strip() else last
    if last != b"data: [DONE]\n":
        yield {"error": f"the stream ended with {last!r}"}


def _choice(piece: Json) -> Json:
    """Text, finish reason and log-probabilities of a choice or its piece, of either endpoint."""
    message: Json = piece.get("message") or piece.get("delta") or {}
    logprobs: Json = piece["logprobs"] or {}
    entries = logprobs.get("content")
    if entries is None:
        names = ("tokens", "token_logprobs", "top_logprobs")
        entries = [list(entry) for entry in zip(*(logprobs.get(k, ()) for k in names), strict=True)]
    return {
        "text": piece.get("text", message.get("content", "")),
        "finish": piece["finish_reason"],
        "logprobs": entries,
    }
