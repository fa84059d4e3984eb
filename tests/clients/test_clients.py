"""Real clients, each in an environment of its own, see what the server was told to say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.clients.cases import CASES, KEY, Case, Json
from tests.clients.relay import Relay
from tests.clients.roster import CLIENTS, Client, Mode
from tests.server.conftest import RunningServer, make_folder

ENGINE = (sys.executable, str(Path(__file__).with_name("predicting_engine.py")))
RETRY_AFTER_S = 1.0  # what a 503 asks for
RUNS = [(client, mode, case) for client in CLIENTS for mode in client.modes for case in CASES]


class Bench:
    """Servers that are ready, busy and still loading, and what each client saw of them."""

    def __init__(self, ready: RunningServer, relay: Relay, places: dict[str, str]) -> None:
        self.ready = ready
        self.relay = relay
        self._places = places  # URLs by name
        self._ids = count(1000, 10)  # the seed of the task: the engine's journal has it
        self._tasks: dict[tuple[str, str, str], int] = {}
        self._seen: dict[str, dict[int, Json]] = {}

    def seen(self, client: Client) -> dict[int, Json]:
        """What a client saw, by the task's id; it runs once, whether or not that goes well."""
        if client.name not in self._seen:
            self._seen[client.name] = {}
            self._seen[client.name] = self._run(client)
        return self._seen[client.name]

    def id(self, client: Client, mode: Mode, case: Case) -> int:
        return self._tasks[client.name, mode.name, case.name]

    def _run(self, client: Client) -> dict[int, Json]:
        tasks = [
            self._task(client, mode, case)
            for mode in client.modes
            for case in CASES
            if case.name not in mode.lacks
        ]
        done = subprocess.run(
            client.command,
            input="".join(json.dumps(task) + "\n" for task in tasks),
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, **client.variables},
        )
        assert done.returncode == 0, done.stderr
        notes = [json.loads(line) for line in done.stdout.split("\n")[:-1]]
        return {note["id"]: note["seen"] for note in notes}

    def _task(self, client: Client, mode: Mode, case: Case) -> Json:
        task_id = next(self._ids)
        self._tasks[client.name, mode.name, case.name] = task_id
        is_retry = case.place == "retry"
        url = f"{self.relay.url}/{task_id}" if is_retry else self._places[case.place]
        return {
            "id": task_id,
            "mode": mode.name,
            "url": f"{url}/v1",
            "key": case.key,
            "body": {"model": "toy", "messages": case.messages, "seed": task_id, **case.body},
            "extra": case.extra,
            "usage": case.usage,
            "retries": 2 if is_retry else 0,
            "cancels": case.cancels,
        }


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    port = _free_port()
    loading_url = f"http://127.0.0.1:{port}"
    with (
        _serving(tmp_path_factory.mktemp("loads"), port=port, load_s=300),
        _serving(tmp_path_factory.mktemp("ready"), engine_command=ENGINE) as ready,
        _serving(
            tmp_path_factory.mktemp("busy"), api_keys=(KEY,), max_queued_requests=1, grace_s=0.0
        ) as busy,
    ):
        ready.wait_ready()
        busy.wait_ready()
        ready.eventually(lambda: _listens(port))
        with Relay.between(loading_url, ready.url) as relay, _occupied(busy):
            places = {"loading": loading_url, "ready": ready.url, "busy": busy.url}
            yield Bench(ready, relay, places)


@contextmanager
def _occupied(server: RunningServer) -> Iterator[None]:
    """One request waits for its first token, and there is no room for another."""
    prompt = '[[{"wait_s": 600}]]x'
    connection = server.connect()
    body = json.dumps({"model": "toy", "prompt": prompt}).encode()
    connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}"})
    server.eventually(lambda: server.journal("add"))
    yield
    connection.close()


@contextmanager
def _serving(folder: Path, **options: Any) -> Iterator[RunningServer]:
    """A server that is ended in any case and must not have complained."""
    running = RunningServer(make_folder(folder), **options)
    try:
        yield running
    finally:
        complaints = running.end()
    assert complaints == "", "the server complained while clients ran"


@pytest.mark.parametrize(
    ("client", "mode", "case"),
    RUNS,
    ids=[f"{client.name}-{mode.name}-{case.name}" for client, mode, case in RUNS],
)
def test_a_client_sees_what_the_server_says(
    bench: Bench, client: Client, mode: Mode, case: Case
) -> None:
    if client.missing:
        pytest.skip(client.missing)
    if case.name in mode.lacks:
        pytest.skip(f"{client.name} cannot: {mode.lacks[case.name]}")
    seen = bench.seen(client)[bench.id(client, mode, case)]
    if case.cancels:
        check_cancelled(bench, seen, mode, case, bench.id(client, mode, case))
        return
    error = seen.get("error") or {}
    found = {
        **{key: seen.get(key) for key in ("texts", "usage", "prediction", "logprobs")},
        "finish": [reason for reason in seen["finish"] if reason is not None],
        **{f"error.{key}": error.get(key) for key in ("status", "code", "param")},
    }
    expected = case.expected(streams=mode.streams)
    for key, cases in mode.hides.items():
        if case.name in cases:
            expected[key] = None  # once it is shown, this fails and the roster is to be mended
    assert found == expected, error
    if case.refusal is not None:
        assert case.refusal.message in error["message"]
    if mode.streams:
        assert "".join(seen["deltas"]) == "".join(found["texts"][:1])
        assert not any("\ufffd" in delta for delta in seen["deltas"])
    if case.place == "retry":
        first, second = bench.relay.attempts[str(bench.id(client, mode, case))]
        assert (first.status, second.status) == (503, 200)
        assert second.answered_at - first.answered_at >= RETRY_AFTER_S, "the header is followed"
    if case.name == "extra":
        check_extra(bench, case, bench.id(client, mode, case))


def check_cancelled(bench: Bench, seen: Json, mode: Mode, case: Case, seed: int) -> None:
    """The engine was told; the client had the beginning of the text if it streams."""
    assert "error" not in seen
    (added,) = noted(bench, "add", seed=seed)
    bench.ready.eventually(lambda: noted(bench, "abort", id=added["id"]))
    assert noted(bench, "finish", id=added["id"]) == []
    assert bool(seen["deltas"]) == mode.streams
    assert case.text.startswith("".join(seen["deltas"]))


def check_extra(bench: Bench, case: Case, seed: int) -> None:
    """Fields of this server's own reached the engine."""
    (added,) = noted(bench, "add", seed=seed)
    (params,) = noted(bench, "params", id=added["id"])
    assert params["top_k"] == case.extra["top_k"]
    assert added["speculation"]["max_nodes"] == case.extra["speculation"]["max_nodes"]


def noted(bench: Bench, what: str, **facts: Any) -> list[Json]:
    return [note for note in bench.ready.journal(what) if facts.items() <= note.items()]


def test_every_client_folder_is_on_the_roster() -> None:
    folders = {path.parent.name for path in Path(__file__).parent.glob("*/driver.*")}
    assert folders == {client.name for client in CLIENTS}


def test_the_roster_names_cases_and_observations_that_exist() -> None:
    modes = [mode for client in CLIENTS for mode in client.modes]
    assert {name for mode in modes for name in mode.lacks} <= {case.name for case in CASES}
    assert {name for mode in modes for names in mode.hides.values() for name in names} <= {
        case.name for case in CASES
    }
    assert {key for mode in modes for key in mode.hides} <= CASES[0].expected(streams=True).keys()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
