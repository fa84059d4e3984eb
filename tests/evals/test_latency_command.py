"""`specdec bench latency` from the command line: its lines, files and refusals, and the trend"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals.latency import bench
from specdec.evals.latency import trend as latency_trend
from specdec.evals.latency.answer_summary import BASELINE
from specdec.evals.latency.command import latency
from specdec.evals.latency.prompts import QUICK_PROMPTS
from specdec.evals.latency.server_peer import ServerPeer
from specdec.evals.latency.settings import LatencySettings
from specdec.evals.latency.side import Side
from specdec.evals.report.journal import Journal
from specdec.options import DEFAULTS
from tests.evals.latency_case import (
    echo_peer,
)
from tests.evals.test_latency import FIXED, report_of
from tests.evals.toy_folder import write_toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("latency") / "model")


# --- the trend ---


def test_a_line_is_compared_with_its_own_kind(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trend.jsonl"
    assert latency_trend.read(path) == []
    line = latency_trend.line_of(report_of(folder, "torch"))
    name = "step / floor, 1 rows, context 20"
    known = {f"chat: {BASELINE} / echo", f"chat: {FIXED} / {BASELINE}", "2 streams / one", name}
    assert known < set(line["ratios"])
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
    line = latency_trend.line_of(report_of(folder, "torch"))
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


def test_the_lines_of_ci_are_of_the_standard_contenders() -> None:
    """What `make bench` writes has the names of its older lines."""
    lines = latency_trend.read(Path(__file__).parents[2] / "docs" / "latency.jsonl")
    names = [side.name for side in LatencySettings(EngineConfig()).sides]
    assert "specdec, ngram" in names
    for prompt in QUICK_PROMPTS:
        name = f"{prompt.task}: specdec, ngram / {BASELINE}"
        assert all(name in line["ratios"] for line in lines)


# --- the command ---


def test_the_command_prints_appends_and_compares(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, data = tmp_path / "trend.jsonl", tmp_path / "data.jsonl"
    data.write_text('{"prompt": "Hi", "task": "a"}\n{"prompt": "Ho", "task": "b"}\n')
    report = report_of(folder, "torch")
    asked: list[LatencySettings] = []

    def measure(
        settings: LatencySettings, servers: Mapping[str, ServerPeer], journal: Journal
    ) -> dict[str, Any]:
        asked.append(settings)
        return report

    with patch.object(bench, "measure", measure), echo_peer():
        latency(append=path, vs=["echo"], gguf=path, kv="int8", max_tokens=7, data=[data])
        first = capsys.readouterr().out
        latency(append=path, quick=True)
        second = capsys.readouterr().out
        latency(append=path, as_json=True, quick=True, rounds=3, max_tokens=40)
        printed = capsys.readouterr().out
        latency(data=[data], task=["b"], drafter=["suffix"], temperature=[0.5, 0.0])
        latency(answers_only=True, as_markdown=True)
        assert "| **specdec, ngram** |" in capsys.readouterr().out
    whole, quick, given, task, answers = asked
    assert (whole.peers, whole.gguf, whole.config.kv) == (("echo",), path, "int8")
    assert (whole.max_tokens, whole.rounds, len(whole.samples)) == (7, 3, 2)
    assert (
        quick == LatencySettings(DEFAULTS, max_tokens=32, rounds=2, samples=QUICK_PROMPTS).quick()
    )
    assert given == LatencySettings(DEFAULTS, max_tokens=40, samples=QUICK_PROMPTS).quick()
    assert [sample.task for sample in task.samples] == ["b"]
    assert (task.sides, task.temperatures) == ((Side("suffix", "adaptive"),), (0.5, 0.0))
    assert answers == LatencySettings(DEFAULTS, answers_only=True)
    assert "trend: 0 earlier" in first and "trend: 1 earlier" in second
    assert "(+0 %)" in second
    assert json.loads(printed) == report
    assert len(path.read_text().splitlines()) == 3


def test_the_command_writes_a_folder(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    report = report_of(folder, "torch")
    with patch.object(bench, "measure", lambda *_: report):
        latency(out=tmp_path / "out", as_json=True)
    shown = ("steps", "breakdown", "lengths", "speeds", "ratios")
    tables = (*shown, "answers", "times", "prompts", "every-ratio")
    figures = ("ratios", "speed", "steps", "breakdown", "times-0")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(
        [
            *("latency.json", "latency.html"),  # and no journal any more
            *(f"latency-{name}.csv" for name in tables),
            *(f"latency-{name}.png" for name in figures),
        ]
    )
    assert json.loads((tmp_path / "out" / "latency.json").read_text()) == report


def test_the_command_refuses_before_it_measures(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    cases: list[tuple[dict[str, Any], str]] = [
        ({"out": tmp_path / "file"}, "name a folder"),
        ({"append": tmp_path}, "cannot append to"),
        ({"weights": "fp3"}, "unknown weights 'fp3'"),
        ({"data": [bad]}, r"bad\.jsonl:2: prompt must be text"),
        ({"drafter": ["best"]}, "unknown drafter"),
        ({"vs": ["nobody"]}, "unknown peer"),
        ({"task": ["poems"]}, "no task 'poems' in the data; there are: chat, code edit"),
        ({"append": tmp_path / "a.jsonl", "answers_only": True}, "--append keeps ratios of steps"),
    ]
    with patch.object(bench, "measure", lambda *_: pytest.fail("measured")):
        for options, words in cases:
            with pytest.raises(UsageError, match=words):
                latency(**options)
