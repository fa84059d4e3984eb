"""Connections: slow, silent, long-winded and malformed clients, byte by byte."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.conftest import RunningServer, make_folder, read_to_end
from tests.server.script import chat, script

if TYPE_CHECKING:
    from pathlib import Path

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = json.dumps({"model": "toy", "prompt": "[[{}]]hello"}).encode()
LIMIT = 5000  # bytes of a body


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_folder(tmp_path_factory.mktemp("model"))
    running = RunningServer(
        folder,
        max_body_len=LIMIT,
        max_header_len=2048,
        header_timeout_s=0.5,
        body_timeout_s=0.5,
        send_timeout_s=1.0,
    )
    running.wait_ready()
    yield running
    assert running.end() == "", "what clients do wrong is not the operator's news"
    assert running.process.returncode == 0


def parsed(text: str) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer."""
    head, _, body = text.partition("\r\n\r\n")
    assert "x-request-id: " in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(body) < 1024
    return int(head.split()[1]), error


def read_answer(connection: socket.socket) -> str:
    """One answer of a connection that stays open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head)
    assert found, head
    while len(body) < int(found[1]):
        body += connection.recv(65536)
    return (head + b"\r\n\r\n" + body).decode()


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def test_a_head_that_comes_slowly_is_408(server: RunningServer) -> None:
    with server.open(b"POST /v1/comp") as connection:
        started = time.monotonic()
        for byte in b"letions HTTP/1.1\r\nX: ":
            time.sleep(0.02)
            connection.sendall(bytes([byte]))
        status, _ = parsed(read_to_end(connection))
    assert status == 408
    assert time.monotonic() - started < 5


def test_so_is_the_head_of_a_second_request(server: RunningServer) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with server.open(request) as connection:
        assert read_answer(connection).startswith("HTTP/1.1 200")
        connection.sendall(request)
        assert read_answer(connection).startswith("HTTP/1.1 200")
        connection.sendall(b"GET /hea")  # its end never comes
        assert parsed(read_to_end(connection))[0] == 408


def test_a_connection_that_says_nothing_is_closed(server: RunningServer) -> None:
    assert server.exchange(b"") == ""


def test_a_body_that_comes_slowly_is_408(server: RunningServer) -> None:
    with server.open(HEAD + b"Content-Length: 4000\r\n\r\n" + BODY) as connection:
        for _ in range(20):
            time.sleep(0.03)
            connection.sendall(b" ")
        assert parsed(read_answer(connection))[0] == 408


def test_a_chunk_that_never_ends_is_408(server: RunningServer) -> None:
    data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY) + b"5\r\nab"
    with server.open(data) as connection:
        assert parsed(read_answer(connection))[0] == 408


def test_chunks_make_a_body(server: RunningServer) -> None:
    data = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = server.exchange(data + chunked(BODY[:7], BODY[7:]) + b"0\r\n\r\n")
    assert '"text":"hello"' in answer


def test_a_stated_length_that_is_too_long_is_413_at_once(server: RunningServer) -> None:
    with server.open(HEAD + b"Content-Length: %d\r\n\r\n" % (LIMIT + 1)) as connection:
        status, error = parsed(read_answer(connection))
    assert (status, error["code"]) == (413, "request_too_large")


def test_who_sends_all_the_same_still_reads_why(server: RunningServer) -> None:
    with server.open(HEAD + b"Content-Length: 4000000\r\n\r\n") as connection:
        for _ in range(40):
            connection.sendall(b"x" * 100_000)
        assert parsed(read_answer(connection))[0] == 413
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200"), "and may go on"


def test_chunks_that_add_up_to_too_much_are_413(server: RunningServer) -> None:
    data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(*[b"x" * 1000] * 6)
    with server.open(data) as connection:
        status, error = parsed(read_answer(connection))
    assert (status, error["code"]) == (413, "request_too_large")


def test_a_body_of_just_the_limit_is_read(server: RunningServer) -> None:
    body = BODY + b" " * (LIMIT - len(BODY))
    answer = server.request("POST", "/v1/completions", body)
    assert answer.json["choices"][0]["text"] == "hello"


@pytest.mark.parametrize("is_in_pieces", [False, True])
@pytest.mark.parametrize(
    "line",
    [b"X-Long: " + b"a" * 3000, b"\r\n".join(b"X-%d: %d" % (n, n) for n in range(300))],
    ids=["one", "many"],
)
def test_a_long_head_is_431(server: RunningServer, line: bytes, is_in_pieces: bool) -> None:
    data = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + line + b"\r\n\r\n"
    with server.open() as connection:
        for start in range(0, len(data), 700 if is_in_pieces else len(data)):
            connection.sendall(data[start : start + (700 if is_in_pieces else len(data))])
            time.sleep(0.02)
        status, error = parsed(read_to_end(connection))
    assert (status, error["code"]) == (431, "request_too_large")


def test_a_long_target_is_431(server: RunningServer) -> None:
    target = b"/health?" + b"a" * 3000
    answer = server.exchange(b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
    assert parsed(answer)[0] == 431


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 99),
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA b: c\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1e3\r\n\r\n",
        HEAD + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
    ],
)
def test_what_is_not_http_is_400(server: RunningServer, data: bytes) -> None:
    status = server.exchange(data).split()[1]
    assert status in ("400", "413", "501"), status
    assert server.get("/health").status == 200


def test_an_upgrade_is_not_taken(server: RunningServer) -> None:
    upgrade = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n"
    answer = server.exchange(b"GET /health HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")
    assert answer.startswith("HTTP/1.1 200")


def on_and_on(**fields: object) -> bytes:
    """A request whose answer does not end by itself."""
    prompt = script("on ", end=False, delay_s=0.01)
    body = {"model": "toy", "prompt": prompt, "max_tokens": 1500, **fields}
    raw = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(raw) + raw


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_is_missed_even_after_it_sent_more(
    server: RunningServer, is_streamed: bool
) -> None:
    """A second request behind the first must not keep the server from seeing the end of both."""
    num_added, num_aborted = len(server.journal("add")), len(server.journal("abort"))
    connection = server.open(on_and_on(stream=is_streamed))
    server.eventually(lambda: len(server.journal("add")) == num_added + 1)
    for _ in range(3):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.05)
    connection.close()
    server.eventually(lambda: len(server.journal("abort")) == num_aborted + 1, timeout_s=2)


def stalled(server: RunningServer, **fields: object) -> socket.socket:
    """A client that never reads, of an answer longer than what the sockets between them hold."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection.connect((host, int(port)))
    body = {**chat("on ", end=False), "max_tokens": 1800, "n": 4, **fields}
    raw = json.dumps({**body, "logprobs": True, "top_logprobs": 20}).encode()
    head = HEAD.replace(b"completions", b"chat/completions")
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
    return connection


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_reads_nothing_is_dropped(server: RunningServer, is_streamed: bool) -> None:
    server.eventually(lambda: server.num_sockets == 1)  # it listens; nobody else's is still open
    num_before = server.num_sockets
    connections = [stalled(server, stream=is_streamed) for _ in range(2)]
    server.eventually(lambda: server.num_sockets > num_before)
    answer = server.request("POST", "/v1/completions", BODY)
    assert answer.json["choices"][0]["text"] == "hello", "nobody else waits for it"
    server.eventually(lambda: server.num_sockets == num_before, timeout_s=30)
    for connection in connections:
        with connection:
            text = read_to_end(connection)
        assert not is_whole(text), "the sockets held all of it"


def is_whole(answer: str) -> bool:
    """Whether an answer came to its end, by its length or, of a stream, by its last event.

    Its last byte says nothing: a cut falls on a brace as easily as anywhere else.
    """
    head, _, body = answer.partition("\r\n\r\n")
    length = re.search(r"(?i)content-length: (\d+)", head)
    return len(body.encode()) >= int(length[1]) if length else "[DONE]" in body


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_reads_has_it_whole(server: RunningServer, is_streamed: bool) -> None:
    with stalled(server, stream=is_streamed, max_tokens=2) as connection:
        received = ""
        while not is_whole(received):
            data = connection.recv(65536)
            assert data, "the answer was cut"
            received += data.decode(errors="replace")


def test_a_client_that_reads_slowly_is_served(server: RunningServer) -> None:
    with stalled(server, stream=True, n=4) as connection:
        received = bytearray()
        for _ in range(8):  # longer than the time that silence may last
            time.sleep(0.25)
            received += connection.recv(20_000)
        text = received.decode() + read_to_end_of_stream(connection)
    assert text.count('"finish_reason":"length"') == 4


def read_to_end_of_stream(connection: socket.socket) -> str:
    received = b""
    while b"[DONE]" not in received[-100:]:
        data = connection.recv(65536)
        assert data, "the stream was cut"
        received += data
    return received.decode()


def test_nothing_is_left_of_them(own_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    server = own_server(header_timeout_s=0.3, body_timeout_s=0.3, send_timeout_s=0.5)
    server.wait_ready()
    assert server.get("/health").status == 200
    assert server.request("POST", "/v1/completions", BODY.replace(b"{", b'{"stream": true, ', 1))
    server.eventually(lambda: server.num_tasks <= 10)
    num_sockets, num_tasks = server.num_sockets, server.num_tasks
    connections = [
        *(server.open(data) for data in (b"", b"GET /", HEAD, HEAD + b"Content-Length: 9\r\n\r\n")),
        stalled(server, stream=True),
    ]
    time.sleep(0.1)
    assert server.num_sockets > num_sockets
    server.eventually(lambda: server.num_sockets <= num_sockets, timeout_s=20)
    server.eventually(lambda: server.num_tasks <= num_tasks, timeout_s=20)
    for connection in connections:
        connection.close()
