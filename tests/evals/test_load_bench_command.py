"""specdec bench load: options become settings, and what makes no sense is refused at once."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals.bench_commands import bench_app
from specdec.evals.data.sample import Sample
from specdec.evals.load.lengths import Lengths
from specdec.evals.load.level import Level, parse_levels
from specdec.evals.load.prompts import WORDS, SamplePrompts, SyntheticPrompts
from specdec.evals.load.sweep import parse_sweep
from tests.evals.toy_folder import write_toy
from tests.server.conftest import RunningServer, make_folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(make_folder(tmp_path_factory.mktemp("model")))
    running.wait_ready()
    yield running
    running.end(signal.SIGKILL)


def bench(*options: object) -> Result:
    return CliRunner().invoke(bench_app, ["load", *map(str, options)])


def levels_of(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["levels"]
    return found


def test_prompts_are_drawn_from_the_ranges() -> None:
    prompts = SyntheticPrompts(Lengths(5, 9), Lengths(3, 4), seed=1, shared_prefix=6)
    asks = [prompts.ask("rate-1", index) for index in range(200)]
    texts = [ask.body["messages"][0]["content"].split() for ask in asks]
    assert {len(text) - 6 for text in texts} == set(range(5, 10))
    assert {ask.body["max_tokens"] for ask in asks} == {3, 4}
    assert all(ask.body["ignore_eos"] for ask in asks)
    assert len({tuple(text[:6]) for text in texts}) == 1
    assert len({tuple(text[6:]) for text in texts}) == 200
    assert set(texts[0]) <= set(WORDS)
    assert asks == [prompts.ask("rate-1", index) for index in range(200)]
    assert prompts.ask("rate-2", 0) != asks[0], "another level's prompts are not in the cache"
    assert SyntheticPrompts(Lengths(5, 9), Lengths(3, 4), 2, 6).ask("rate-1", 0) != asks[0]


def test_samples_come_in_turn_each_by_its_route() -> None:
    samples = (
        Sample("1", "chat", ({"role": "user", "content": "Hi"},), ("And now?",)),
        Sample("2", "code", text="def f("),
        Sample("3", "ids", prompt_ids=(1, 2, 3)),
    )
    prompts = SamplePrompts(samples, Lengths(8, 8), seed=0)
    first, second, third, again = (prompts.ask("rate-1", index) for index in range(4))
    assert first.body["messages"] == [{"role": "user", "content": "Hi"}]
    assert (first.route, second.route) == ("/chat/completions", "/completions")
    assert (second.body["prompt"], third.body["prompt"]) == ("def f(", [1, 2, 3])
    assert again.body == first.body == {**first.body, "max_tokens": 8}
    assert "ignore_eos" not in first.body
    assert [prompts.visit(index) for index in range(7)] == [0, 0, 0, 1, 1, 1, 2]


@given(st.integers(1, 500), st.integers(0, 500), st.integers())
def test_lengths_are_within_their_range(shortest: int, more: int, seed: int) -> None:
    lengths = Lengths.parse(f"{shortest}-{shortest + more}", "--x")
    assert shortest <= lengths.draw(random.Random(seed)) <= shortest + more
    assert Lengths.parse(str(lengths), "--x") == lengths


@pytest.mark.parametrize("text", ["", "0", "-5", "9-3", "a", "1-2-3", "1.5"])
def test_lengths_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--prompt-tokens takes a length"):
        Lengths.parse(text, "--prompt-tokens")


def test_levels_are_put_in_order() -> None:
    assert parse_levels("8,1,2", None) == (
        Level(concurrency=1),
        Level(concurrency=2),
        Level(concurrency=8),
    )
    assert [level.name for level in parse_levels(None, "2,0.5")] == ["rate-0.5", "rate-2"]
    assert [level.load for level in parse_levels(None, None)] == [1, 2, 4, 8]


def test_a_sweep_changes_one_setting() -> None:
    config = EngineConfig()
    plain, eight = parse_sweep("node_budget=0,8", config)
    assert plain.config is not None
    assert eight.config is not None
    assert (plain.config.node_budget, eight.config.node_budget) == (0, 8)
    assert (plain.is_off, eight.is_off) == (True, False)
    none, both = parse_sweep("drafter=none,prediction+suffix", config)
    assert both.config is not None
    assert both.config.drafter == "prediction,suffix"
    assert none.is_off
    warm = parse_sweep("temperature=0,0.5", None)
    assert [one.fields for one in warm] == [{"temperature": 0}, {"temperature": 0.5}]
    assert not any(one.is_off for one in warm)
    off, on = parse_sweep("speculation.enabled=false,true", None)
    assert (off.fields, off.is_off) == ({"speculation": {"enabled": False}}, True)
    assert (on.fields, on.is_off) == ({"speculation": {"enabled": True}}, False)
    nobody, two = parse_sweep("drafters=none,ngram+suffix", None)
    assert (nobody.fields, nobody.is_off) == ({"speculation": {"enabled": False}}, True)
    assert two.fields == {"speculation": {"drafters": ["ngram", "suffix"]}}
    assert parse_sweep("drafters=a+b", None)[0].file_part == "drafters=a+b"
    assert parse_sweep("stop=a/b", None)[0].file_part == "stop=a%2Fb"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--concurrency", "0"], "--concurrency takes numbers above 0"),
        (["--concurrency", "1.5"], "whole numbers"),
        (["--concurrency", "1", "--rate", "1"], "one per run"),
        (["--rate", "x"], "--rate takes numbers above 0"),
        (["--rate", "inf"], "--rate takes numbers above 0"),
        (["--rate", "1", "--burstiness", "0"], "--burstiness must be more than 0"),
        (["--duration", "-1"], "--duration must be more than 0"),
        (["--duration", "5", "--requests", "5"], "choose --requests or --duration"),
        (["--price-per-hour", "nan"], "--price-per-hour must be more than 0"),
        (["--served-model", "m"], "--served-model needs --url"),
        (["--api-key", "k"], "--api-key needs --url"),
        (["--url", "http://x", "--drafter", "suffix"], "--drafter is for the start of a server"),
        (["--url", "http://x", "--model", "m"], "--model is for the start of a server"),
        (["--burstiness", "0.5"], "--burstiness is of the arrivals of --rate"),
        (["--sweep", "stream=true,false"], "always streamed"),
        (["--goodput", "itl:5"], "--goodput takes"),
        (["--task", "chat"], "--task chooses from --data"),
        (["--data", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--url", "nowhere"], "is no address"),
        (["--url", "http://x", "--sweep", "node_budget=0,8"], "is a setting of the server"),
        (["--sweep", "node_budget"], "key=a,b,c"),
        (["--sweep", "node_budget=1,1"], "different values"),
        (["--sweep", "node_budget=1,-1"], "node budget must be"),
        (["--sweep", "node_budget=a"], "node_budget does not take"),
        (["--sweep", "control=often"], "unknown control"),
        (["--node-budget", "-1"], "node budget must be"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(options: list[str], words: str) -> None:
    found = bench(*options)
    assert isinstance(found.exception, UsageError)
    assert words in str(found.exception)


def test_a_shared_prefix_is_not_for_samples(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "Hi"}\n')
    found = bench("--data", data, "--shared-prefix", 5)
    assert "leave out --data" in str(found.exception)
    data.write_text('{"prompt": "Hi"}\n{"prompt": 3}\n')
    assert f"{data}:2" in str(bench("--data", data).exception)


def test_prompts_that_are_made_up_against_a_url(server: RunningServer, tmp_path: Path) -> None:
    found = bench(
        *("--url", f"{server.url}/v1", "--concurrency", "2", "--requests", 5, "--api-key", "key-1"),
        *("--prompt-tokens", "3-6", "--output-tokens", "4-9", "--shared-prefix", 4, "--json"),
        *("--out", tmp_path / "out"),
    )
    (level,) = levels_of(found)
    assert level["completed"] == level["num_prompts"] == 5
    assert level["endpoint_type"] == "openai-chat"
    assert level["model_id"] == "toy"
    own = json.loads((tmp_path / "out/load-concurrency-2.json").read_text())
    assert all(4 <= length <= 9 for length in own["output_lens"])
    assert all(length > 7 * 3 for length in own["input_lens"])


def test_levels_of_an_earlier_run_do_not_stay(server: RunningServer, tmp_path: Path) -> None:
    ask = ("--url", server.url, "--requests", 2, "--output-tokens", 3, "--out", tmp_path)
    assert bench(*ask, "--concurrency", "1,2").exit_code == 0
    (tmp_path / "load-notes.json").write_text("{}")
    assert bench(*ask, "--concurrency", "2,4").exit_code == 0
    assert {file.name for file in tmp_path.glob("load-*.json")} == {
        *("load-concurrency-2.json", "load-concurrency-4.json", "load-notes.json"),
    }
    first = json.loads((tmp_path / "load.json").read_text())
    first["levels"] = [{"file": "../load-2.json"}, {"file": "notes.json"}]
    for name in ("load-2.json", "notes.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "load.json").write_text(json.dumps(first))
    assert bench(*ask, "--concurrency", "1").exit_code == 0
    assert (tmp_path / "load-2.json").exists() and (tmp_path / "notes.json").exists()
    (tmp_path / "load.json").write_text("[")
    assert bench(*ask, "--concurrency", "1").exit_code == 0


def test_samples_by_a_schedule(server: RunningServer, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "Hello there", "task": "a"}\n{"text": "no", "task": "b"}\n')
    found = bench(
        *("--url", server.url, "--rate", "100,200", "--requests", 6, "--warmup", 2, "--json"),
        *("--data", data, "--task", "a", "--output-tokens", 50, "--burstiness", 0.5),
    )
    slow, fast = levels_of(found)
    assert (slow["request_rate"], fast["request_rate"]) == (100, 200)
    for level in (slow, fast):
        assert (level["num_prompts"], level["num_sent"], level["completed"]) == (6, 8, 6)
        assert level["total_output_tokens"] == 6 * len("Hello there ")  # and the end
        assert level["burstiness"] == 0.5
        assert level["max_concurrency"] is None
        assert level["endpoint_type"] == "openai"


def test_a_key_is_in_no_report(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        *("--url", server.url, "--api-key", "key-1", "--requests", "2", "--concurrency", "1"),
        *("--prompt-tokens", "3", "--output-tokens", "3", "--out", str(tmp_path)),
    ]
    monkeypatch.setattr("sys.argv", ["specdec", "bench", "load", *options])
    found = bench(*options)
    assert found.exit_code == 0
    texts = [file.read_bytes() for file in tmp_path.iterdir()]
    assert not any(b"key-1" in text for text in texts)
    assert b"--api-key" in (tmp_path / "load.json").read_bytes()


def test_servers_of_our_own_are_started_for_each_value(tmp_path: Path) -> None:
    found = bench(
        *("--model", write_toy(tmp_path / "toy"), "--backend", "torch", "--weights", "fp32"),
        *("--threads", 1, "--kv-memory-mib", 8, "--drafter", "ngram", "--control", "fixed"),
        *("--sweep", "node_budget=0,4", "--concurrency", "2", "--requests", 4, "--json"),
        *("--prompt-tokens", "4", "--output-tokens", "8", "--out", tmp_path / "out"),
    )
    plain, drafting = levels_of(found)
    assert (plain["label"], drafting["label"]) == ("node_budget=0", "node_budget=4")
    assert plain["tokens_per_step"] == 1.0
    assert drafting["tokens_per_step"] >= 1.0
    for level in (plain, drafting):
        assert level["completed"] == 4
        assert level["disagreement"] is None
        assert level["total_output_tokens"] == 4 * 8, "answers do not end before their length"
        assert level["model_id"] == str(tmp_path / "toy")
    assert (tmp_path / "out/load-gain.png").exists()
