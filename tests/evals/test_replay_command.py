"""`specdec eval replay` from the command line: what it prints, and what it refuses"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UsageError
from specdec.evals.replay.command import replay
from tests.evals.toy_folder import write_toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


def line(**fields: Any) -> str:
    return json.dumps(fields) + "\n"


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (line(prompt_ids=[1], id="x"), {}, "sample 'x' has no recorded answer.*eval acceptance"),
        (line(text="a", output=""), {}, "sample 'line 1' has an empty answer"),
        (line(prompt_ids=[1], output_ids=[9999]), {}, r"data.jsonl:1 has token 9999.*--model"),
        (line(prompt_ids=[9999], output_ids=[1]), {}, r"data.jsonl:1 has token 9999.*--model"),
        (line(text="a" * 600, output="b"), {}, "has 601 tokens.*holds 512"),
        (line(text="a" * 9, output="b"), {"max_model_len": 8}, "has 10 tokens.*holds 8"),
        (line(text="a", output="b"), {"max_model_len": 9999}, "exceeds the model's 512"),
        (line(text="a", output="b"), {"node_budget": "x"}, "--node-budget takes numbers"),
        (line(text="a", output="b"), {"node_budget": "0"}, "--node-budget must be between"),
        (line(text="a", output="b"), {"depth": "0"}, "--depth must be between"),
        (line(text="a", output="b"), {"drafter": ["nobody"]}, "unknown drafter 'nobody'"),
        (line(text="a", output="b"), {"task": ["none"]}, "no task 'none'"),
        (line(text="a", output="b"), {"drafter": ["none"]}, "has nothing to replay"),
        ("{\n", {}, r"data.jsonl:1: "),
    ],
)
def test_wrong_data_and_options_are_told(
    folder: Path, tmp_path: Path, text: str, options: dict[str, Any], words: str
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        replay(data=[file], model=str(folder), **options)


def test_data_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"--data FILE .*eval acceptance"):
        replay()


def test_the_command_prints_its_report(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(line(text="abab", output="abab") + line(text="cdcd", output="cdcd", task="c"))
    replay(data=[file], model=str(folder), drafter=["suffix"], node_budget="4", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"] == ["untold", "c"] and found["settings"][0]["drafter"] == "suffix"
    replay(data=[file], model=str(folder), drafter=["suffix"], node_budget="4,8", task=["c"])
    shown = capsys.readouterr().out
    assert "1 recorded answers, 4 tokens" in shown and "suffix, 8 nodes" in shown
