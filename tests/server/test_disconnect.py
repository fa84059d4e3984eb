"""A client that goes away takes its engine requests with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.server.open_request import hang_up, send
from tests.server.script import say

if TYPE_CHECKING:
    from tests.server.conftest import RunningServer


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("n", [1, 3])
def test_the_engine_requests_are_aborted(
    server: RunningServer, streamed: bool, how: str, n: int
) -> None:
    num_added, num_aborted = len(server.journal("add")), len(server.journal("abort"))
    connection = send(server, stream=streamed, n=n)
    if streamed:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    server.eventually(lambda: len(server.journal("add")) == num_added + n)
    hang_up(connection, how)
    server.eventually(lambda: len(server.journal("abort")) == num_aborted + n)
    aborted = server.journal("abort")[-n:]
    assert {note["id"] for note in aborted} == {note["id"] for note in server.journal("add")[-n:]}


@pytest.mark.parametrize("streamed", [False, True])
def test_also_before_the_first_token(server: RunningServer, streamed: bool) -> None:
    num_added, num_aborted = len(server.journal("add")), len(server.journal("abort"))
    connection = send(server, stream=streamed, wait_s=60)
    server.eventually(lambda: len(server.journal("add")) == num_added + 1)
    hang_up(connection, "close")
    server.eventually(lambda: len(server.journal("abort")) == num_aborted + 1)
    assert server.journal("abort")[-1]["num_tokens"] == 0


def test_nor_does_the_engine_hear_of_who_goes_while_the_prompt_is_read(
    server: RunningServer,
) -> None:
    """Rendering and encoding a long prompt takes a while, and nobody waits for this one."""
    num_added = len(server.journal("add"))
    messages = [{"role": "user", "content": "word " * 200_000}]
    body = json.dumps({"model": "toy", "messages": messages, "max_tokens": 1500}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    connection = server.open(head % len(body) + body)
    server.eventually(lambda: server.get("/debug/load").status == 200)  # the body has arrived
    hang_up(connection, "close")
    answer = server.client.chat.completions.create(model="toy", messages=say("next"))
    assert answer.choices[0].message.content == "next"
    assert len(server.journal("add")) == num_added + 1
    assert server.get("/debug/load").json["queued"] == 0


def test_an_answer_that_ended_is_not_aborted(server: RunningServer) -> None:
    num_aborted = len(server.journal("abort"))
    messages = [{"role": "user", "content": "short"}]
    server.client.chat.completions.create(model="toy", messages=messages)
    list(server.client.chat.completions.create(model="toy", messages=messages, stream=True))
    assert len(server.journal("abort")) == num_aborted


def test_a_client_that_does_not_read_holds_nobody_up(server: RunningServer) -> None:
    def num_finished() -> int:
        return len(server.journal("finish"))

    before = num_finished()
    logprobs = {"logprobs": True, "top_logprobs": 20}  # more than sockets would buffer
    stalled = [send(server, stream=True, n=4, delay_s=0, **logprobs) for _ in range(2)]
    server.eventually(lambda: num_finished() == before + 8, timeout_s=20)
    answer = server.client.chat.completions.create(model="toy", messages=say("still here"))
    assert answer.choices[0].message.content == "still here"
    for connection in stalled:
        hang_up(connection, "reset")
