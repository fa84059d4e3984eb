"""Supervision: an engine process that dies or hangs ends its requests, and another one serves."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import pytest

from specdec.out_of_memory import OUT_OF_MEMORY
from tests.server.conftest import is_alive
from tests.server.script import chat

if TYPE_CHECKING:
    from tests.server.conftest import RunningServer

HANG_S = 1.5
WHY = {
    "crash": "the engine failed: RuntimeError: the script says so",
    "exit": "the engine process ended with exit code 7",
    "hang": f"the engine process hangs: no sign of life for {HANG_S} s",
    "kill": "the engine process was killed by signal 9 (often: out of memory)",
    "oom": OUT_OF_MEMORY,
    "stop": f"the engine process hangs: no sign of life for {HANG_S} s",
}

OwnServer = Callable[..., "RunningServer"]


def ready(own_server: OwnServer, *, is_held: bool = True, **settings: object) -> RunningServer:
    """A server whose next engines load until they are let go, so that their absence is seen."""
    server = own_server(**{"hang_s": HANG_S, **settings})
    server.wait_ready()
    if is_held:
        (server.folder / "held").touch()
    return server


def pid_of_engine(server: RunningServer) -> int:
    return int(server.journal("loaded")[-1]["pid"])


def health(server: RunningServer) -> tuple[int, str]:
    answer = server.get("/health")
    return answer.status, "" if answer.status == 200 else answer.json["error"]["message"]


def serves_again(server: RunningServer, old: int) -> None:
    """A new engine process answers, and nothing is left of the old one."""
    (server.folder / "held").unlink(missing_ok=True)
    server.eventually(lambda: health(server)[0] == 200, timeout_s=10)
    assert pid_of_engine(server) != old
    assert not is_alive(old)
    answer = server.client.chat.completions.create(**chat("again"))
    assert answer.choices[0].message.content == "again"


def has_added(server: RunningServer, before: int) -> bool:
    return len(server.journal("add")) > before


def events(said: str) -> list[str]:
    """Lines about the engine, times as T."""
    lines = [line for line in said.splitlines() if line.startswith(("error:", "ready again"))]
    return [re.sub(r"after \d+\.\d s", "after T", line) for line in lines]


@pytest.mark.parametrize("how", WHY)
def test_an_engine_that_ends_while_it_streams(own_server: OwnServer, how: str) -> None:
    """Every open stream ends with an error that the official client raises."""
    server = ready(own_server)
    old = pid_of_engine(server)
    create = server.client.chat.completions.create
    bystander = create(**chat("x", delay_s=0.02, end=False), max_tokens=1900, stream=True)
    next(bystander)
    victim = create(**chat("abc", die=how, die_after=2), stream=True)
    text = [next(victim).choices[0].delta.content for _ in range(3)]
    with pytest.raises(openai.APIError) as caught:
        list(victim)
    assert ("".join(text), caught.value.message) == ("ab", WHY[how])
    with pytest.raises(openai.APIError) as caught:
        list(bystander)
    assert caught.value.message == WHY[how]
    assert health(server) == (503, f"{WHY[how]}; it is starting again")
    early = server.post("/v1/chat/completions", chat("a"))
    assert (early.status, early.headers["retry-after"]) == (503, "1")
    serves_again(server, old)
    assert events(server.end()) == [
        f"error: {WHY[how]}; starting it again",
        "ready again after T",
    ]
    assert server.process.returncode == 0


@pytest.mark.parametrize("how", WHY)
def test_an_engine_that_ends_while_a_whole_answer_waits(own_server: OwnServer, how: str) -> None:
    server = ready(own_server)
    old = pid_of_engine(server)
    answer = server.post("/v1/chat/completions", chat("abc", die=how, die_after=2))
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.json["error"]["message"] == WHY[how]
    assert health(server)[0] == 503
    serves_again(server, old)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, WHY["kill"]),
        (signal.SIGSEGV, "the engine process was killed by signal 11"),
        (signal.SIGSTOP, WHY["stop"]),
    ],
)
def test_an_engine_that_ends_while_it_is_idle(
    own_server: OwnServer, number: signal.Signals, why: str
) -> None:
    server = ready(own_server)
    old = pid_of_engine(server)
    os.kill(old, number)
    server.eventually(lambda: health(server) == (503, f"{why}; it is starting again"))
    serves_again(server, old)


def test_a_hang_is_seen_within_five_seconds_by_default(own_server: OwnServer) -> None:
    server = own_server()
    server.wait_ready()
    os.kill(pid_of_engine(server), signal.SIGSTOP)
    server.eventually(lambda: health(server)[0] == 503, timeout_s=6)  # one for this test's clock


def test_an_engine_that_ends_while_the_next_one_loads(own_server: OwnServer) -> None:
    """The second start waits a little, and a minute of peace is not over."""
    server = ready(own_server)
    old = pid_of_engine(server)
    os.kill(old, signal.SIGKILL)
    server.eventually(lambda: len(server.journal("loading")) == 2, timeout_s=10)
    os.kill(server.journal("loading")[-1]["pid"], signal.SIGTERM)
    serves_again(server, old)
    why = "the engine process was killed by signal"
    assert events(server.end()) == [
        f"error: {why} 9 (often: out of memory); starting it again",
        f"error: {why} 15; starting it again in 0.5 s",
        "ready again after T",
    ]


def test_an_engine_that_cannot_start_again_is_tried_again(own_server: OwnServer) -> None:
    """Each attempt waits twice as long as the one before; /health says what is wrong."""
    server = ready(own_server, is_held=False)
    old = pid_of_engine(server)
    (server.folder / "broken").touch()
    os.kill(old, signal.SIGKILL)
    why = "the weights are broken; pull the model again"
    server.eventually(lambda: health(server) == (503, f"{why}; it is starting again"), 10)
    server.eventually(lambda: len(server.journal("loading")) == 4, timeout_s=10)
    (server.folder / "broken").unlink()
    serves_again(server, old)
    said = events(server.end())
    assert said[:3] == [
        f"error: {WHY['kill']}; starting it again",
        f"error: {why}; starting it again in 0.5 s",
        f"error: {why}; starting it again in 1 s",
    ]
    assert said[-1] == "ready again after T"


def test_loading_may_take_longer_than_a_hang(own_server: OwnServer) -> None:
    server = own_server(load_s=2 * HANG_S, hang_s=HANG_S)
    server.wait_ready()
    assert server.end() == ""


def test_an_idle_engine_has_no_long_step(own_server: OwnServer, tmp_path: Any) -> None:
    (tmp_path / "model-0").mkdir()
    (tmp_path / "model-0" / "longest_step_s").write_text("60")
    server = ready(own_server)
    server.client.chat.completions.create(**chat("then idle"))
    os.kill(pid_of_engine(server), signal.SIGSTOP)
    server.eventually(lambda: health(server)[0] == 503)


@pytest.mark.parametrize("longest_step_s", [0.0, 60.0])
def test_a_step_may_take_as_long_as_the_engine_says(
    own_server: OwnServer, tmp_path: Any, longest_step_s: float
) -> None:
    (tmp_path / "model-0").mkdir()
    (tmp_path / "model-0" / "longest_step_s").write_text(str(longest_step_s))
    server = ready(own_server)
    answer = server.post("/v1/chat/completions", chat("a", delay_s=2 * HANG_S))
    is_fine = longest_step_s > 0
    assert answer.status == (200 if is_fine else 503)
    assert (WHY["hang"] in answer.text) is not is_fine


def test_steps_that_bring_nothing_are_signs_of_life(own_server: OwnServer) -> None:
    server = ready(own_server)
    answer = server.client.chat.completions.create(**chat("late", wait_s=2 * HANG_S, delay_s=0.05))
    assert answer.choices[0].message.content == "late"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_ends_the_engine_twice_is_refused(
    own_server: OwnServer, is_streamed: bool
) -> None:
    """A neighbour that ran at both deaths is not: it ran again in between, and once more after."""
    server = ready(own_server, is_held=False)
    poison = {**chat("p", die="kill", die_after=1), "stream": is_streamed}
    neighbour = chat("n" * 20, delay_s=0.05)

    def insist(statuses: list[int]) -> None:
        while 200 not in statuses:
            statuses.append(server.post("/v1/chat/completions", neighbour).status)

    for death in (1, 2):
        statuses: list[int] = []
        before = len(server.journal("add"))
        thread = threading.Thread(target=insist, args=(statuses,))
        thread.start()
        server.eventually(partial(has_added, server, before))
        answer = server.post("/v1/chat/completions", poison)
        assert WHY["kill"] in answer.text
        thread.join()
        assert set(statuses) == {503, 200}
        assert len(server.journal("loaded")) == 1 + death
    refused = server.post("/v1/chat/completions", poison)
    assert (refused.status, refused.json["error"]["type"]) == (400, "invalid_request_error")
    assert refused.json["error"]["message"] == (
        "this request ended the engine twice and is not run again"
    )
    assert len(server.journal("loaded")) == 3


@pytest.mark.parametrize("is_loading", [False, True])
def test_an_engine_that_is_busy_does_not_outlive_a_killed_server(
    own_server: OwnServer, is_loading: bool
) -> None:
    server = ready(own_server, hang_s=60)
    pid = pid_of_engine(server)
    if is_loading:
        os.kill(pid, signal.SIGKILL)
        server.eventually(lambda: len(server.journal("loading")) == 2, timeout_s=10)
        pid = server.journal("loading")[-1]["pid"]
    else:
        stream = server.client.chat.completions.create(
            **chat("abc", die="hang", die_after=1), stream=True
        )
        next(stream)
    server.process.kill()
    server.eventually(lambda: not is_alive(pid), timeout_s=10)


def test_a_signal_while_the_engine_starts_again_ends_the_server(own_server: OwnServer) -> None:
    server = ready(own_server)
    os.kill(pid_of_engine(server), signal.SIGKILL)
    server.eventually(lambda: len(server.journal("loading")) == 2, timeout_s=10)
    pid = server.journal("loading")[-1]["pid"]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=3) == 0
    assert not is_alive(pid)
