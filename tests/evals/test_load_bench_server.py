"""Load against a server: client, server and a second observer count the same; nothing is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UsageError
from specdec.evals.client.endpoint import Endpoint
from specdec.evals.client.exchange import Exchange
from specdec.evals.load.bench import LoadSettings, run
from specdec.evals.load.extent import Extent
from specdec.evals.load.goals import Goals
from specdec.evals.load.level import Level, parse_levels
from specdec.evals.load.load_run import LoadRun
from specdec.evals.load.loops import run_level
from specdec.evals.load.prompts import Ask
from specdec.evals.load.sender import Sender
from specdec.evals.load.server_counts import ServerCounts, client_counts
from specdec.evals.load.sweep import Series, parse_sweep
from tests.evals.recording_proxy import RecordingProxy
from tests.server.conftest import RunningServer, make_folder

TEXT = "a quick brown fox jumps over a lazy dog and runs on"


@dataclass(frozen=True)
class Scripted:
    """Prompts for the scripted engine: bursts and lengths that differ from request to request."""

    before: Callable[[int], object] = lambda index: None
    more: str = ""

    def ask(self, level: str, index: int) -> Ask:
        self.before(index)
        length = 5 + index * 7 % 40
        script = f'[[{{"burst": {1 + index % 4}{self.more}}}]]{TEXT[:length]}'
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"{index} {script}"}],
            "max_tokens": 60,
        }
        return Ask("/chat/completions", body)

    def visit(self, index: int) -> int:
        return 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(make_folder(tmp_path_factory.mktemp("model")))
    running.wait_ready()
    yield running
    running.end(signal.SIGKILL)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    started: list[RunningServer] = []

    def start(**settings: Any) -> RunningServer:
        started.append(RunningServer(make_folder(tmp_path / f"model-{len(started)}"), **settings))
        started[-1].wait_ready()
        return started[-1]

    yield start
    for running in started:
        running.end(signal.SIGKILL)


def load(
    url: str, level: Level, extent: Extent, prompts: Scripted
) -> tuple[LoadRun, ServerCounts, Sender]:
    """One level, and what the server counted meanwhile."""

    async def work() -> tuple[LoadRun, ServerCounts, Sender]:
        async with Endpoint(url) as endpoint:
            sender = Sender(endpoint, await endpoint.model(), prompts, 0.0)
            await sender.find_out()
            before = ServerCounts.read(await endpoint.get_text("/metrics"))
            found = await run_level(level, sender.of(Series(), level), extent)
            after = ServerCounts.read(await endpoint.get_text("/metrics"))
            assert before is not None
            assert after is not None
            return found, after.minus(before), sender

    return asyncio.run(work())


@pytest.mark.parametrize(
    "level", [Level(concurrency=1), Level(concurrency=5), Level(rate=200.0)], ids=lambda x: x.name
)
def test_client_server_and_a_second_observer_agree(server: RunningServer, level: Level) -> None:
    proxy = RecordingProxy(server.url)
    found, counted, sender = load(proxy.url, level, Extent(requests=24), Scripted())
    proxy.close()
    assert sender.refused == ()
    assert {one.exchange.outcome for one in found.sent} == {"ok"}
    client = client_counts(found.sent)
    assert counted.requests == client.requests == len(found.sent)
    assert counted.prompt_tokens == client.prompt_tokens
    assert counted.output_tokens == client.output_tokens
    for name in ("ttft", "e2el"):
        assert counted.times[name][1] == client.times[name][1], f"as many {name}"
    # What comes first has no time before it: in the server a step, here whatever was read at once.
    exchanges = [one.exchange for one in found.sent]
    firsts = [exchange.arrivals[0].num_tokens or 0 for exchange in exchanges]
    assert client.times["itl"][1] == client.output_tokens - sum(firsts)
    steps = [min(1 + one.index % 4, one.exchange.num_output) for one in found.sent]
    assert counted.times["itl"][1] == counted.output_tokens - sum(steps)

    streams = proxy.streams()[1:]  # the first was to find out what the server takes
    stats = [exchange.stats for exchange in exchanges]
    assert sorted(
        (stream.text, stream.prompt_tokens, stream.completion_tokens, stream.num_accepted)
        for stream in streams
    ) == sorted(
        (exchange.text, exchange.num_prompt, exchange.num_output, own.num_accepted if own else -1)
        for exchange, own in zip(exchanges, stats, strict=True)
    )
    for exchange in exchanges:
        assert sum(arrival.num_tokens or 0 for arrival in exchange.arrivals) == exchange.num_output

    # The client sends before the server has a request, and reads after it has sent.
    server_ttft, client_ttft = counted.times["ttft"][0], client.times["ttft"][0]
    assert server_ttft <= client_ttft
    assert counted.times["e2el"][0] <= client.times["e2el"][0]
    assert server_ttft + counted.times["itl"][0] <= client_ttft + client.times["itl"][0]
    assert client_ttft + client.times["itl"][0] <= client.times["e2el"][0]


def test_a_proxy_saw_each_first_token_before_the_client(server: RunningServer) -> None:
    proxy = RecordingProxy(server.url)
    found, _, _ = load(proxy.url, Level(concurrency=1), Extent(requests=8), Scripted())
    proxy.close()
    tokens = [
        at
        for connection in proxy.connections
        for at, data in connection.answers
        if b'"delta":{"content":"' in data
    ]
    posts = [
        at
        for connection in proxy.connections
        for at, data in connection.requests
        if data.startswith(b"POST")
    ][1:]
    for one, post in zip(found.sent, posts, strict=True):
        exchange = one.exchange
        first_at = exchange.sent_at + (exchange.ttft_s or 0)
        assert exchange.sent_at <= post <= min(at for at in tokens if at > post) <= first_at


def test_overload_is_counted_apart_and_nothing_is_lost(
    own_server: Callable[..., RunningServer],
) -> None:
    server = own_server(max_queued_requests=2)
    prompts = Scripted(more=', "wait_s": 0.1')
    found, counted, _ = load(
        server.url, Level(concurrency=8), Extent(requests=30, warmup=0), prompts
    )
    outcomes = [one.exchange.outcome for one in found.counted]
    assert len(outcomes) == 30
    assert "error" not in outcomes
    assert outcomes.count("overloaded") > 0
    assert outcomes.count("ok") + outcomes.count("overloaded") == 30
    assert counted.requests == sum(one.exchange.outcome == "ok" for one in found.sent)
    refused = [one.exchange for one in found.sent if one.exchange.outcome == "overloaded"]
    assert {one.status for one in refused} == {503}
    assert all("queue is full" in one.error for one in refused)
    assert [one.index for one in found.sent] == list(range(len(found.sent)))


def settings_of(url: str, **more: Any) -> LoadSettings:
    defaults: dict[str, Any] = {
        "levels": parse_levels("1,3", None),
        "series": parse_sweep(None, None),
        "extent": Extent(requests=6),
        "prompts": Scripted(),
        "asked": "scripted prompts",
        "url": url,
    }
    return LoadSettings(**{**defaults, **more})


def test_a_server_that_dies_leaves_a_report(
    own_server: Callable[..., RunningServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = own_server()

    def kill(index: int) -> None:
        if index == 12:
            server.process.kill()
            server.process.wait()

    settings = settings_of(
        server.url,
        extent=Extent(requests=100),
        prompts=Scripted(kill),
        levels=parse_levels("2", None),
    )
    assert run(settings, tmp_path, as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    (level,) = report["levels"]
    assert level["completed"] + level["failed"] == level["num_prompts"] > 20
    assert level["failed"] >= 20
    assert "given up after 20 errors in a row" in level["stopped"]
    assert "ClientConnector" in level["stopped"]
    assert "given up" in (tmp_path / "load.html").read_text()


def test_a_finished_level_is_not_measured_again(server: RunningServer, tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    @dataclass(frozen=True)
    class Noted(Scripted):
        fails: bool = True

        def ask(self, level: str, index: int) -> Ask:
            asked.append((level, index))
            if self.fails and level == "concurrency-3":
                raise KeyboardInterrupt
            return super().ask(level, index)

    settings = settings_of(server.url, prompts=Noted())
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path, as_json=True)
    assert not (tmp_path / "load.json").exists()
    with pytest.raises(UsageError, match="other settings"):
        run(replace(settings, seed=1), tmp_path, as_json=True)
    asked.clear()
    assert run(replace(settings, prompts=Noted(fails=False)), tmp_path, as_json=True) == 0
    assert {level for level, _ in asked} == {"trial", "concurrency-3"}
    assert not (tmp_path / "load.part.jsonl").exists()
    levels = json.loads((tmp_path / "load.json").read_text())["levels"]
    assert [level["level"] for level in levels] == ["concurrency-1", "concurrency-3"]


def test_files_of_a_sweep(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(
        server.url,
        series=parse_sweep("speculation.max_nodes=0,8", None),
        goals=Goals.parse("ttft:1000"),
        price=2.0,
        api_key="a-secret",
    )
    assert run(settings, tmp_path, as_json=False) == 0
    text = capsys.readouterr().out
    assert "a-secret" not in text
    names = {file.name for file in tmp_path.iterdir()}
    flat = {
        f"load-speculation.max_nodes={nodes}-concurrency-{clients}.json"
        for nodes in (0, 8)
        for clients in (1, 3)
    }
    pictures = {f"load-{name}.png" for name in ("latency", "frontier", "goodput", "gain")}
    tables = {f"load-{name}.csv" for name in ("levels", "times", "agreement", "gain")}
    assert names == {"load.json", "load.html"} | flat | pictures | tables
    report = json.loads((tmp_path / "load.json").read_text())
    journal = server.journal("add")
    limits = [note["speculation"]["max_nodes"] for note in journal]
    assert {0, 8} <= set(limits)
    for level in report["levels"]:
        own = json.loads((tmp_path / level["file"]).read_text())
        assert {key: own[key] for key in level} == level
        assert own["num_prompts"] == len(own["ttfts"]) == len(own["itls"]) == 6
        assert own["completed"] == 6
        assert own["total_output_tokens"] == sum(own["output_lens"])
        assert own["disagreement"] is None
        assert own["label"].startswith("speculation.max_nodes=")
    names_of = {(one["of"], one["figure"]) for one in report["compared"]}
    assert ("speculation.max_nodes=8, concurrency-3", "TTFT ms, mean") in names_of
    assert ("speculation.max_nodes=0, concurrency-1", "output tokens/s") in names_of
    parts = next(one["parts"] for one in report["compared"] if one["figure"] == "ITL ms, mean")
    assert len(parts) == 6


def test_others_on_the_same_server_are_noticed(server: RunningServer, tmp_path: Path) -> None:
    def ask_too(index: int) -> None:
        if index == 4:
            body = {"model": "toy", "prompt": "[[{}]]Hello", "max_tokens": 5}
            assert server.post("/v1/completions", body).status == 200

    settings = settings_of(server.url, prompts=Scripted(ask_too), levels=parse_levels("1", None))
    assert run(settings, tmp_path, as_json=True) == 0
    (level,) = json.loads((tmp_path / "load.json").read_text())["levels"]
    assert "requests against" in level["disagreement"]
    sides = level["counted_by_server"], level["counted_by_client"]
    assert sides[0]["output_tokens"] == sides[1]["output_tokens"] + 5


def test_what_no_server_takes_is_said_before_anything_is_measured(
    server: RunningServer, tmp_path: Path
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"no server answers at {url}/v1/models"):
            run(settings_of(url), tmp_path, as_json=True)
    with pytest.raises(UsageError, match="is no address"):
        run(settings_of("localhost:8000"), tmp_path, as_json=True)
    sweep = parse_sweep("temperature=0,-1", None)
    with pytest.raises(UsageError, match=r"temperature=-1: 400 .*temperature"):
        run(settings_of(server.url, series=sweep), tmp_path, as_json=True)
    with pytest.raises(UsageError, match=r"404 .*nobody"):
        run(settings_of(server.url, served_model="nobody"), tmp_path, as_json=True)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--out"):
        run(settings_of(server.url), tmp_path / "file", as_json=True)


@pytest.mark.parametrize(
    "refused", [{"ignore_eos", "cache_salt"}, {"cache_salt", "continuous_usage_stats"}], ids=str
)
def test_fields_that_a_server_refuses_are_left_out(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, refused: set[str]
) -> None:
    """A server that knows OpenAI's fields alone: what it refuses is found out one by one."""
    is_counted = "continuous_usage_stats" not in refused
    real = Endpoint.ask

    async def strict(self: Endpoint, route: str, body: dict[str, Any]) -> Exchange:
        if refused & set(body) or (self.asks_counts and not is_counted):
            return Exchange(0.0, 0.0, "error", status=400, error="unknown field")
        return await real(self, route, body)

    monkeypatch.setattr(Endpoint, "ask", strict)

    class Ignoring(Scripted):
        def ask(self, level: str, index: int) -> Ask:
            asked = super().ask(level, index)
            return Ask(asked.route, {**asked.body, "ignore_eos": True})

    found, counted, sender = load(server.url, Level(concurrency=2), Extent(requests=4), Ignoring())
    assert set(sender.refused) == refused
    assert {one.exchange.outcome for one in found.sent} == {"ok"}
    assert counted.output_tokens == client_counts(found.sent).output_tokens
    gaps = [one.exchange.itls_s() for one in found.sent]
    assert all((own is not None) == is_counted for own in gaps)
