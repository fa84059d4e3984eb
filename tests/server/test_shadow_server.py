"""serve --shadow: a server repeats what it answered while idle, and nobody notices but its log."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest
import typer.testing

from specdec.cli import app
from tests.server.open_request import hang_up, send
from tests.server.scrape import Scrape
from tests.server.script import chat

if TYPE_CHECKING:
    from tests.server.conftest import RunningServer

OwnServer = Callable[..., "RunningServer"]
DROPPED = {"full": 0, "interrupted": 0, "failed": 0}


def started(own_server: OwnServer, **settings: Any) -> RunningServer:
    server = own_server(**{"shadow": 1.0, **settings})
    server.wait_ready()
    return server


def say(
    server: RunningServer, text: str, fields: dict[str, Any] | None = None, **script: Any
) -> Any:
    return server.client.chat.completions.create(**chat(text, **script), **fields or {})


def facts(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/debug/load").json["shadow"]
    return found


def added(server: RunningServer, *, shadows: bool) -> list[dict[str, Any]]:
    return [note for note in server.journal("add") if note["is_shadow"] == shadows]


def is_through(server: RunningServer, num_checked: int) -> bool:
    return bool(facts(server)["checked"] == num_checked)


def test_every_choice_is_repeated_with_the_seed_that_it_drew(own_server: OwnServer) -> None:
    server = started(own_server)
    say(server, "first", {"n": 2, "temperature": 0.5}, burst=3)
    say(server, "second, to its stop", {"seed": 5, "stop": "to", "logprobs": True})
    fields = {"max_tokens": 3, "presence_penalty": 1, "extra_body": {"cache_salt": "x"}}
    say(server, "third", fields)
    server.eventually(lambda: is_through(server, 4), timeout_s=20)
    assert facts(server) == {"checked": 4, "divergences": 0, "dropped": DROPPED, "waiting": 0}
    real, again = added(server, shadows=False), added(server, shadows=True)
    assert [note["seed"] for note in real] == [None, None, 5, None]
    assert {note["seed"] for note in again} == {note["used_seed"] for note in real}
    assert {note["speculation"]["max_nodes"] for note in again} == {0}
    assert {note["cache_salt"] for note in again} == {"", "x"}
    assert server.end() == ""


def test_a_token_that_differs_is_counted_and_logged_without_text(own_server: OwnServer) -> None:
    server = started(own_server)
    fields = {"temperature": 0, "extra_body": {"request_id": "mine"}}
    say(server, "secret", fields, differs=2)
    server.eventually(lambda: is_through(server, 1))
    say(server, "another one")
    server.eventually(lambda: is_through(server, 2))
    scrape = Scrape(server)
    assert scrape.value("specdec:shadow_checked_total") == 2
    assert scrape.value("specdec:shadow_divergences_total") == 1
    assert scrape.value("specdec:shadow_waiting") == 0
    # More than the one that differs may come at once, but no more than there are.
    num_first = scrape.value("specdec:shadow_tokens_total") - len("another one") - 1
    assert 3 <= num_first <= len("secret") + 1
    assert scrape.value("specdec:shadow_dropped_total", reason="full") == 0
    ids = server.post("/tokenize", {"content": "c"}).json["tokens"]
    assert server.end() == (
        "warning: shadow: chatcmpl-mine choice 0 differs without speculation at output position 2: "
        f"token {ids[0]} was answered, now token {ids[0] ^ 1}; temperature 0, "
        "top-2 margin 1.0000\n"
    )


def test_a_request_ends_a_repetition_before_the_engine_sees_it(own_server: OwnServer) -> None:
    server = started(own_server)
    say(server, "an answer that takes its time", delay_s=0.05)
    server.eventually(lambda: added(server, shadows=True))
    before = Scrape(server)
    load = server.get("/debug/load").json
    assert (load["running"], load["queued"]) == (0, 0)
    assert before.by("finished_reason", "vllm:request_success_total") == {"stop": 1}
    answer = say(server, "short", delay_s=0.02)
    assert answer.choices[0].message.content == "short"
    lines = (server.folder / "journal.jsonl").read_text().splitlines()
    events = [(note["what"], note["id"]) for note in map(json.loads, lines) if "id" in note]
    real = [note["id"] for note in added(server, shadows=False)]
    second = events.index(("add", real[1]))
    assert events[second - 2 : second] == [("add", "shadow-1"), ("abort", "shadow-1")]
    server.eventually(lambda: is_through(server, 2), timeout_s=20)
    scrape = Scrape(server)
    assert facts(server)["dropped"] == DROPPED
    assert scrape.by("finished_reason", "vllm:request_success_total") == {"stop": 2}
    num_output = sum(len(text) + 1 for text in ("an answer that takes its time", "short"))
    assert scrape.value("vllm:generation_tokens_total") == num_output
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert scrape.value(f"vllm:{name}_count") == 2
    assert scrape.value("vllm:inter_token_latency_seconds_count") == num_output - 2
    paths = {"/v1/chat/completions", "/debug/load", "/metrics"}
    assert set(scrape_routes(scrape)) == paths
    assert server.end() == ""


def scrape_routes(scrape: Scrape) -> list[str]:
    lines = scrape.text.splitlines()
    found = [line for line in lines if line.startswith("specdec:http_requests_total{")]
    return [line.partition('route="')[2].partition('"')[0] for line in found]


def test_an_answer_that_its_client_left_or_a_deadline_cut_is_not_repeated(
    own_server: OwnServer,
) -> None:
    server = started(own_server, total_timeout_s=2)
    connection = send(server, stream=True)
    assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    server.eventually(lambda: server.journal("add"))
    hang_up(connection, "reset")
    server.eventually(lambda: server.journal("abort"))
    late = send(server)
    assert late.recv(1000).startswith(b"HTTP/1.1 504")
    late.close()
    say(server, "whole")
    server.eventually(lambda: is_through(server, 1))
    assert len(added(server, shadows=True)) == 1


def test_what_waits_outlives_an_engine_that_ends(own_server: OwnServer) -> None:
    """And the repetition that an engine ends with is not run again, nor is its request suspect."""
    server = started(own_server)
    long = send(server, delay_s=0.02)  # keeps it from being idle
    server.eventually(lambda: server.journal("add"))
    say(server, "it survives")
    assert facts(server)["waiting"] == 1
    os.kill(server.journal("loaded")[-1]["pid"], signal.SIGKILL)
    server.eventually(lambda: is_through(server, 1), timeout_s=20)
    assert facts(server) == {"checked": 1, "divergences": 0, "dropped": DROPPED, "waiting": 0}
    long.close()
    ends: dict[str, Any] = {"fields": {"seed": 5, "temperature": 0.5}, "delay_s": 0.25}
    say(server, "bad", **ends)
    server.eventually(lambda: len(added(server, shadows=True)) == 2)
    os.kill(server.journal("loaded")[-1]["pid"], signal.SIGKILL)
    server.eventually(lambda: facts(server)["dropped"]["failed"] == 1)
    server.eventually(lambda: server.get("/health").status == 200, timeout_s=10)
    with ThreadPoolExecutor(1) as pool:  # the first end that is its own
        num_added = len(server.journal("add"))
        answer = pool.submit(say, server, "bad", **ends)
        server.eventually(lambda: len(server.journal("add")) > num_added)
        os.kill(server.journal("loaded")[-1]["pid"], signal.SIGKILL)
        assert isinstance(answer.exception(), openai.APIError)
    server.eventually(lambda: server.get("/health").status == 200, timeout_s=10)
    assert say(server, "bad", **ends).choices[0].finish_reason == "stop"
    said = server.end().splitlines()
    assert len([line for line in said if line.startswith("ready again")]) == 3
    assert not [line for line in said if "shadow" in line or "Traceback" in line]


def test_without_a_share_there_is_no_trace(server: RunningServer) -> None:
    say(server, "one")
    assert "shadow" not in server.get("/metrics").text
    assert "shadow" not in server.get("/debug/load").text
    assert not added(server, shadows=True)


@pytest.mark.parametrize("verification", ["rejection", "typical"])
def test_rules_that_promise_no_equal_tokens_are_refused(verification: str) -> None:
    arguments = ["serve", "--shadow", "0.01", "--verification", verification, "--port", "0"]
    result = typer.testing.CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert f"--verification {verification} does not promise" in str(result.exception)
