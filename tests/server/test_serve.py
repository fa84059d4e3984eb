"""The life of a server: loading, signals, and addresses that do not work."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import openai
import pytest

from specdec.errors import UsageError
from specdec.server.serve import bind
from tests.server.conftest import is_alive
from tests.server.script import chat

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.conftest import RunningServer


def say(text: str, **directives: object) -> dict[str, Any]:
    return {**chat(text, **directives), "stream": True}


def test_the_server_process_never_imports_torch() -> None:
    code = "import sys, specdec.server.serve; print('torch' in sys.modules)"
    command = [sys.executable, "-P", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False\n"


def test_health_is_503_while_the_model_loads(own_server: Callable[..., RunningServer]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = own_server(port=port, load_s=1.0)
    server.url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return bool(server.get("/version").status)
        except ConnectionRefusedError:
            return False

    server.eventually(answers, timeout_s=10)
    health = server.get("/health")
    assert health.status == 503
    assert health.json["error"]["message"] == "the model is loading"
    early = server.post("/v1/chat/completions", say("a"))
    assert early.status == 503
    assert early.headers["retry-after"] == "1"
    server.wait_ready()
    assert server.get("/health").status == 200
    assert server.end() == ""
    assert server.process.returncode == 0


def test_an_engine_that_cannot_start(
    own_server: Callable[..., RunningServer], tmp_path: Any
) -> None:
    (tmp_path / "model-0").mkdir()
    (tmp_path / "model-0" / "broken").touch()
    server = own_server()
    server.process.wait(timeout=15)
    said = server.said.rest(timeout_s=15)
    assert said == "error: the weights are broken; pull the model again\n"
    assert server.process.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_answers_finish(
    own_server: Callable[..., RunningServer], number: int
) -> None:
    server = own_server(grace_s=10)
    server.wait_ready()
    (loaded,) = server.journal("loaded")
    running = server.client.chat.completions.create(**say("finish me " * 4, delay_s=0.05))
    next(running)
    server.process.send_signal(number)
    server.eventually(lambda: server.get("/health").status == 503, timeout_s=1)
    refused = server.post("/v1/chat/completions", say("a"))
    assert refused.status == 503
    assert refused.headers["retry-after"] == "1"
    rest = list(running)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == "finish me " * 4
    assert rest[-1].choices[0].finish_reason == "stop"
    assert server.process.wait(timeout=10) == 0
    assert server.end() == "stopping: 1 answer still runs; a second signal ends it now\n"
    server.eventually(lambda: not is_alive(loaded["pid"]))


def test_what_waits_when_the_signal_comes_is_answered_too(
    own_server: Callable[..., RunningServer],
) -> None:
    """A whole answer and one that has no token yet: both were accepted."""
    server = own_server(grace_s=10)
    server.wait_ready()
    answers: list[int] = []

    def ask(**directives: object) -> None:
        body = {**say("ab", **directives), "stream": False}
        answers.append(server.post("/v1/chat/completions", body).status)

    asked: list[dict[str, float]] = [{"wait_s": 1.0}, {"delay_s": 0.2}]
    threads = [threading.Thread(target=ask, kwargs=directives) for directives in asked]
    for thread in threads:
        thread.start()
    server.eventually(lambda: len(server.journal("add")) == 2)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert answers == [200, 200]
    assert server.process.wait(timeout=5) == 0
    assert server.end() == "stopping: 2 answers still run; a second signal ends them now\n"


@pytest.mark.parametrize("is_second_signal", [False, True])
def test_the_end_of_grace_is_an_error_event(
    own_server: Callable[..., RunningServer], is_second_signal: bool
) -> None:
    server = own_server(grace_s=60 if is_second_signal else 0.3)
    server.wait_ready()
    running = server.client.chat.completions.create(**say("long", delay_s=0.05, end=False))
    next(running)
    server.process.send_signal(signal.SIGTERM)
    if is_second_signal:
        server.eventually(lambda: server.get("/health").status == 503)
        server.process.send_signal(signal.SIGTERM)
    before = time.monotonic()
    with pytest.raises(openai.APIError, match="shutting down"):
        list(running)
    assert time.monotonic() - before < 1.5
    assert server.process.wait(timeout=5) == 0


def test_a_signal_while_loading_ends_the_server(own_server: Callable[..., RunningServer]) -> None:
    server = own_server(load_s=30)
    server.eventually((server.folder / "journal.jsonl").exists, timeout_s=10)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=3) == 0


def test_a_killed_server_leaves_no_engine_behind(own_server: Callable[..., RunningServer]) -> None:
    server = own_server()
    server.wait_ready()
    (loaded,) = server.journal("loaded")
    running = server.client.chat.completions.create(**say("long", delay_s=0.05, end=False))
    next(running)
    assert is_alive(loaded["pid"])
    server.process.kill()
    server.eventually(lambda: not is_alive(loaded["pid"]))


def test_a_port_in_use_is_one_clear_line(
    own_server: Callable[..., RunningServer], server: RunningServer
) -> None:
    port = int(server.url.rpartition(":")[2])
    second = own_server(port=port)
    second.process.wait(timeout=15)
    said = second.said.rest(timeout_s=15)
    assert second.process.returncode == 2
    assert said == (
        f"error: cannot listen on 127.0.0.1:{port}: address already in use;"
        " choose another with --port\n"
    )


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 70_000, "port must be between"),
        ("127.0.0.1", -1, "port must be between"),
        ("no such host", 0, "cannot listen on host 'no such host'"),
        ("a" * 300, 0, "cannot listen on host"),
        ("192.0.2.1", 0, "cannot listen on 192.0.2.1"),
    ],
)
def test_an_address_that_cannot_be_used(host: str, port: int, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        bind(host, port)
    assert "\n" not in str(caught.value)


def test_many_clients_at_once(server: RunningServer) -> None:
    answers: list[str] = []

    def ask(number: int) -> None:
        body = say(f"number {number}", burst=1 + number % 4)
        chunks = server.client.chat.completions.create(**body)
        answers.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == sorted(f"number {number}" for number in range(16))
