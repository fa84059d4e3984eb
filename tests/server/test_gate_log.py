"""The access log and CORS: what an operator is told, and which pages may ask."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.conftest import RunningServer

SECRET = "hunter2"


def lines(said: str) -> list[dict[str, Any]]:
    assert said.isascii()
    assert all(c.isprintable() or c == "\n" for c in said)
    return [json.loads(line) for line in said.splitlines()]


def test_a_line_for_each_request(own_server: Callable[..., RunningServer]) -> None:
    server = own_server(access_log=True, max_body_len=1000)
    server.wait_ready()
    body = {"model": "toy", "prompt": "[[{}]]hello"}
    server.post("/v1/completions", body, X_Request_Id="mine-1")
    server.post("/v1/completions", {**body, "stream": True})
    server.post("/v1/completions", {**body, "model": "none"})
    server.post("/v1/completions", b"x" * 2000)
    server.get("/health")
    server.get("/nothing")
    server.request("DELETE", "/v1/models")
    log = lines(server.end())
    seen = [(entry["method"], entry["route"], entry["status"]) for entry in log]
    assert seen == [
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/completions", 404),
        ("POST", None, 413),
        ("GET", "/health", 200),
        ("GET", None, 404),
        ("DELETE", "/v1/models", 405),
    ]
    for entry in log[:2]:
        assert (entry["prompt_tokens"], entry["completion_tokens"]) == (11, 6)
    assert not any("prompt_tokens" in entry for entry in log[2:])
    assert log[0]["request_id"] == "mine-1"
    assert all(entry["request_id"].startswith("req-") for entry in log[1:])
    assert all(0 <= entry["seconds"] < 20 for entry in log)
    times = [datetime.fromisoformat(entry["time"]) for entry in log]
    assert times == sorted(times)


def test_nothing_that_a_client_writes_is_logged(own_server: Callable[..., RunningServer]) -> None:
    server = own_server(access_log=True, api_keys=(SECRET,))
    server.wait_ready()
    head = "\r\n".join(
        [
            f"Authorization: Bearer {SECRET}",
            f"X-Request-Id: {SECRET} \x1b[31m",
            f"Referer: {SECRET}",
            f"User-Agent: {SECRET}",
            "Connection: close",
            "",
            "",
        ]
    ).encode()
    body = json.dumps({"model": SECRET, "prompt": SECRET, "user": SECRET}).encode()
    for line in (
        f"GET /health?{SECRET}",
        f"GET /{SECRET}",
        f"GET /%0a%7b%22{SECRET}%22%7d%1b[31m%e2%80%a8",
        f"{SECRET.upper()} /health",
        f"GET http://{SECRET}/v1/models",
    ):
        server.exchange(f"{line} HTTP/1.1\r\nHost: {SECRET}\r\n".encode() + head)
    post = f"POST /v1/completions?{SECRET} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    assert "404" in server.exchange(post.encode() + head + body)
    said = server.end()
    assert SECRET not in said.lower()
    assert len(lines(said)) == 6
    assert lines(said)[3]["method"] == "other"


def test_a_client_that_went_away_is_logged_as_such(
    own_server: Callable[..., RunningServer],
) -> None:
    server = own_server(access_log=True)
    server.wait_ready()
    body = json.dumps({"model": "toy", "prompt": '[[{"wait_s": 60}]]a'}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = server.open(head.encode() + body)
    server.eventually(lambda: server.journal("add"))
    connection.close()
    server.eventually(lambda: server.journal("abort"))
    (entry,) = lines(server.end())
    assert entry["status"] == 499
    assert entry["completion_tokens"] == 0


def preflight(server: RunningServer, origin: str) -> Any:
    return server.request(
        "OPTIONS",
        "/v1/chat/completions",
        Origin=origin,
        Access_Control_Request_Method="POST",
        Access_Control_Request_Headers="authorization,content-type,x-stainless-os,x-stainless-lang",
    )


def test_pages_of_named_sites_may_ask(own_server: Callable[..., RunningServer]) -> None:
    ours, other = "https://chat.example.org", "https://example.org"
    server = own_server(cors_origins=(ours,), api_keys=("key",))
    server.wait_ready()
    allowed = preflight(server, ours)  # a preflight brings no key
    assert allowed.status == 200
    assert allowed.headers["access-control-allow-origin"] == ours
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed.headers
    assert "access-control-allow-origin" not in preflight(server, other).headers
    answer = server.get("/v1/models", Origin=ours, Authorization="Bearer key")
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == ours
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    refused = server.get("/v1/models", Origin=ours)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, ours)
    foreign = server.get("/v1/models", Origin=other, Authorization="Bearer key")
    assert "access-control-allow-origin" not in foreign.headers


@pytest.mark.parametrize("origin", ["https://example.org", "null", "http://127.0.0.1:3000"])
def test_without_the_option_no_page_may(server: RunningServer, origin: str) -> None:
    assert preflight(server, origin).status == 405
    answer = server.get("/v1/models", Origin=origin)
    assert not [name for name in answer.headers if name.startswith("access-control")]
