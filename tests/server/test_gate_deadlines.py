"""Deadlines: answers that wait too long for the engine, for a token, or for their end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.conftest import RunningServer, make_folder, serving
from tests.server.script import chat

QUEUE_S, FIRST_S, TOTAL_S = 0.4, 0.9, 3.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(
        make_folder(tmp_path_factory.mktemp("model")),
        queue_timeout_s=QUEUE_S,
        first_token_timeout_s=FIRST_S,
        total_timeout_s=TOTAL_S,
    ) as running:
        yield running


def ask(stream: bool = False, n: int = 1, **directives: object) -> dict[str, Any]:
    return {**chat("ab", **directives), "stream": stream, "n": n, "max_tokens": 1500}


CASES = [
    ({"queue_s": 60}, 503, "overloaded", "the engine was busy for 0.4 s", QUEUE_S),
    ({"wait_s": 60}, 504, "timeout", "no token came within 0.9 s", FIRST_S),
    ({"delay_s": 0.02, "end": False}, 504, "timeout", "not complete after 3 s", TOTAL_S),
]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("directives", "status", "code", "words", "seconds"), CASES)
def test_a_whole_answer_that_is_late_is_an_error(
    server: RunningServer,
    n: int,
    directives: dict[str, Any],
    status: int,
    code: str,
    words: str,
    seconds: float,
) -> None:
    num_aborted = len(server.journal("abort"))
    started = time.monotonic()
    answer = server.post("/v1/chat/completions", ask(n=n, **directives))
    assert time.monotonic() - started >= seconds
    assert answer.status == status
    error = answer.json["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", code, None)
    assert words in error["message"]
    assert ("retry-after" in answer.headers) == (status == 503)
    # The engine's work ends with it.
    server.eventually(lambda: len(server.journal("abort")) == num_aborted + n, timeout_s=2)


@pytest.mark.parametrize(("directives", "status", "code", "words", "seconds"), CASES)
def test_a_stream_that_is_late_ends_with_an_error_event(
    server: RunningServer,
    directives: dict[str, Any],
    status: int,
    code: str,
    words: str,
    seconds: float,
) -> None:
    num_aborted = len(server.journal("abort"))
    started = time.monotonic()
    with pytest.raises(openai.APIError, match=words) as caught:
        list(server.client.chat.completions.create(**ask(stream=True, **directives)))
    assert time.monotonic() - started >= seconds
    assert caught.value.code == code
    server.eventually(lambda: len(server.journal("abort")) == num_aborted + 1, timeout_s=2)


def test_who_has_begun_is_past_the_queue(server: RunningServer) -> None:
    body = ask(queue_s=QUEUE_S / 2, wait_s=0.4)  # its first token comes after QUEUE_S
    answer = server.post("/v1/chat/completions", body)
    assert answer.json["choices"][0]["message"]["content"] == "ab"


def test_who_has_a_token_is_past_the_wait_for_it(server: RunningServer) -> None:
    body = {**ask(delay_s=FIRST_S / 3, end=False), "max_tokens": 4}  # it ends after FIRST_S
    answer = server.post("/v1/chat/completions", body)
    assert answer.json["choices"][0]["message"]["content"] == "abab"


def test_a_late_answer_leaves_its_place(server: RunningServer) -> None:
    for _ in range(3):
        server.post("/v1/chat/completions", ask(queue_s=60))
    facts = server.get("/debug/load").json
    assert (facts["queued"], facts["running"]) == (0, 0)
    assert server.post("/v1/chat/completions", ask()).status == 200
