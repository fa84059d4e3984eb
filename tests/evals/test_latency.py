"""`specdec bench latency`: its arithmetic, its refusals, and a whole report of a toy model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from specdec.config import Backend, EngineConfig
from specdec.errors import UsageError
from specdec.evals import bench_commands
from specdec.evals.latency import bench as latency
from specdec.evals.latency import peers
from specdec.evals.latency import render as latency_table
from specdec.evals.latency import trend as latency_trend
from specdec.evals.latency.bench import BASELINE, DRAFTED, LatencySettings, measure
from specdec.evals.latency.contender import Contender, Run
from specdec.evals.latency.peers import PeerSetup
from specdec.evals.report.tables import table
from specdec.options import DEFAULTS
from tests.evals.toy_folder import load_or_skip, toy_config, write_toy

PROMPTS = {"chat": "Why?", "echo": "abcabcabcabc"}
ROWS, CONTEXTS, ROUNDS, REPEATS = (1, 3), (20, 40), 2, 2
BACKENDS: tuple[Backend, ...] = ("torch", "native")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("latency") / "model")


def echo(setup: PeerSetup) -> Contender:
    """A peer that answers with zeros after a second."""
    return lambda prompt_ids, num_tokens: Run((0,) * num_tokens, 1.0)


@cache
def measured(folder: Path, backend: Backend) -> dict[str, Any]:
    """A whole report with one peer."""
    load_or_skip(toy_config(folder, backend))
    settings = LatencySettings(
        toy_config(folder, backend),
        peers=("echo",),
        max_tokens=8,
        rounds=ROUNDS,
        rows=ROWS,
        contexts=CONTEXTS,
        repeats=REPEATS,
        num_streams=2,
        stream_steps=2,
        prefill_len=30,
        buffer_bytes=2**20,
    )
    with (
        patch.object(latency, "PROMPTS", PROMPTS),
        patch.dict(peers.PEERS, {"echo": echo}),
    ):
        return measure(settings)


# --- arithmetic ---


def run(seconds: float, token_ids: Sequence[int] = (1, 2, 3, 4)) -> Run:
    return Run(tuple(token_ids), seconds)


def test_answers_are_compared_round_by_round() -> None:
    rounds = [
        {BASELINE: run(1.0), DRAFTED: run(0.5), "peer": run(2.0, (1, 2, 9, 4))},
        {BASELINE: run(3.0), DRAFTED: run(1.5), "peer": run(6.0)},
    ]
    found = latency.answer_summary(rounds)
    assert found["ratios"] == {
        f"{DRAFTED} / {BASELINE}": 2.0,
        f"{BASELINE} / peer": 2.0,
        f"{DRAFTED} / peer": 4.0,
    }
    assert found["contenders"][BASELINE]["tokens_per_second"] == round((4.0 + 4 / 3) / 2, 1)
    assert found["contenders"]["peer"]["num_equal"] == 2
    assert found["contenders"][DRAFTED]["num_equal"] == found["num_tokens"] == 4
    prefill = latency.prefill_summary(9, rounds)
    assert prefill["ratios"][f"{BASELINE} / peer"] == 2.0  # twice as long: we are twice as fast
    assert prefill["seconds"] == {BASELINE: 2.0, DRAFTED: 1.0, "peer": 4.0}


# --- the report ---


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_report_is_whole(folder: Path, backend: Backend) -> None:
    found = measured(folder, backend)
    json.dumps(found, allow_nan=False)
    assert found["target"]["backend"] == backend and found["target"]["weights"] == "fp32"
    assert found["target"]["threads"] == 1
    sizes = [(cell["context"], cell["rows"]) for cell in found["steps"]]
    assert sizes == [(context, rows) for context in CONTEXTS for rows in ROWS]
    for cell in found["steps"]:
        assert cell["num_steps"] == ROUNDS * REPEATS
        assert cell["step_ms"]["p50"] >= cell["forward_ms"]["p50"] > 0
        assert cell["step_per_floor"] >= cell["step_per_floor_with_kv"] > 0
    assert len(found["bandwidth"]["rounds"]) == found["settings"]["rounds"] == ROUNDS
    assert found["streams"]["num_streams"] == 2
    assert set(found["breakdown"]) == {BASELINE, DRAFTED}
    assert found["breakdown"][BASELINE]["rows"] == 1.0
    # The first token comes with the prompt; what warmed up is not counted.
    num_decoded = sum(summary["num_tokens"] - 1 for summary in found["prompts"].values())
    assert found["breakdown"][BASELINE]["steps"] == ROUNDS * num_decoded
    assert set(found["prompts"]) == set(PROMPTS)
    for summary in found["prompts"].values():
        assert list(summary["contenders"]) == [BASELINE, DRAFTED, "echo"]
        assert summary["contenders"][DRAFTED]["num_equal"] == summary["num_tokens"] <= 8
        assert summary["contenders"]["echo"]["seconds"] == [1.0] * ROUNDS
        assert len(summary["ratios"]) == 3
    assert found["prefill"]["num_tokens"] == 30
    assert found["prefill"]["seconds"]["echo"] == 1.0


def test_a_peer_that_is_not_to_be_had_stops_before_anything_is_loaded() -> None:
    settings = LatencySettings(EngineConfig(model="/nowhere"), peers=("openvino",))
    with pytest.raises(UsageError, match="openvino-model"):
        measure(settings)


def test_quick_is_smaller_in_everything_that_takes_time() -> None:
    whole = LatencySettings(EngineConfig())
    quick = whole.quick()
    assert quick.repeats < whole.repeats
    assert set(quick.rows) < set(whole.rows) and set(quick.contexts) < set(whole.contexts)


def test_the_table_has_every_section(folder: Path) -> None:
    lines = latency_table.render(measured(folder, "torch")).splitlines()
    text = "\n".join(lines)
    assert max(map(len, lines[lines.index("") :])) <= 100  # below the names of machine and model
    for words in (
        "memory reads",
        "floor:",
        "context  rows",
        "forward ",
        "2 streams",
        "30 tokens of prompt: echo 1.000 s",
        f"chat: {DRAFTED} / echo = ",
    ):
        assert words in text
    assert list(table(["a", "bc"], [("x", 1.5), ("yy", 10)])) == [
        "a    bc",
        "x   1.5",
        "yy   10",
    ]
    assert list(table(["a", "b"], [])) == ["a  b"]
    no_steps = {**measured(folder, "torch"), "breakdown": {BASELINE: {}, DRAFTED: {}}}
    assert "\npart\n" in latency_table.render(no_steps)  # of answers of one token


def test_the_plot_is_a_picture(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from specdec.evals.latency.plot import plot_steps

    plot_steps(measured(folder, "torch"), tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


# --- the trend ---


def test_a_line_is_compared_with_its_own_kind(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trend.jsonl"
    assert latency_trend.read(path) == []
    line = latency_trend.line_of(measured(folder, "torch"))
    name = "step / floor, 1 rows, context 20"
    assert {f"chat: {BASELINE} / echo", "2 streams / one", name} < set(line["ratios"])
    for value, cores in ((1.0, line["cores"]), (2.0, line["cores"]), (9.0, -1)):
        latency_trend.append(path, {**line, "ratios": {name: value}, "cores": cores})
    now = {**line, "ratios": {name: 3.0, "new": 1.0}}
    found = latency_trend.render(now, latency_trend.read(path)).splitlines()
    assert found == [
        "trend: 2 earlier on this kind of machine and target",
        f"{name}: 3.00, last 2.00, median 1.50 (+100 %)",
    ]


def test_a_file_of_something_else_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trend.jsonl"
    line = latency_trend.line_of(measured(folder, "torch"))
    no_cores = {name: value for name, value in line.items() if name != "cores"}
    for text in ("{}", "[]", "x", json.dumps({**line, "ratios": 1}), json.dumps(no_cores)):
        path.write_text(json.dumps(line) + "\n" + text + "\n")
        with pytest.raises(UsageError, match=r"line 2 of .* is not one that --append has written"):
            latency_trend.read(path)
    with pytest.raises(UsageError, match="cannot append to"):
        latency_trend.read(tmp_path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        latency_trend.read(path)


# --- the command ---


def test_the_command_prints_appends_and_compares(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trend.jsonl"
    report = measured(folder, "torch")
    asked: list[LatencySettings] = []

    def measure(settings: LatencySettings) -> dict[str, Any]:
        asked.append(settings)
        return report

    with patch.object(latency, "measure", measure):
        bench_commands.latency(append=path, vs=["openvino"], gguf=path, kv="int8", max_tokens=7)
        first = capsys.readouterr().out
        bench_commands.latency(append=path, quick=True)
        second = capsys.readouterr().out
        bench_commands.latency(append=path, as_json=True, quick=True, rounds=3, max_tokens=40)
        printed = capsys.readouterr().out
    whole, quick, given = asked
    assert (whole.peers, whole.gguf, whole.config.kv) == (("openvino",), path, "int8")
    assert (whole.max_tokens, whole.rounds) == (7, 5)
    assert quick == LatencySettings(DEFAULTS, max_tokens=32, rounds=2).quick()
    assert given == LatencySettings(DEFAULTS, max_tokens=40, rounds=3).quick()
    assert "trend: 0 earlier" in first and "trend: 1 earlier" in second
    assert "(+0 %)" in second
    assert json.loads(printed) == report
    assert len(path.read_text().splitlines()) == 3


def test_the_command_refuses_before_it_measures(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    with patch.object(latency, "measure", lambda settings: pytest.fail("measured")):
        with (
            patch.object(bench_commands, "find_spec", lambda name: None),
            pytest.raises(UsageError, match="--plot needs matplotlib"),
        ):
            bench_commands.latency(plot=tmp_path / "steps.png")
        with pytest.raises(UsageError, match="cannot append to"):
            bench_commands.latency(append=tmp_path)
        with (
            patch.object(bench_commands, "find_spec", lambda name: "found"),
            pytest.raises(UsageError, match=r"cannot write .*: Is a directory"),
        ):
            bench_commands.latency(plot=tmp_path / "folder.png")
        with (
            patch.object(bench_commands, "find_spec", lambda name: "found"),
            pytest.raises(UsageError, match=r"writes a PNG: call it .*/steps\.png"),
        ):
            bench_commands.latency(plot=tmp_path / "steps.xyz")
        assert not (tmp_path / "steps.xyz").exists()
        with pytest.raises(UsageError, match="unknown weights 'fp3'"):
            bench_commands.latency(weights="fp3")
