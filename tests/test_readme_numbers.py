"""The tables of README and docs are what the kept reports say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.evals.acceptance.tables import markdown
from specdec.evals.crossover.report import streams_table
from specdec.evals.latency.markdown import markdown as latency_markdown
from specdec.evals.latency.markdown import short_markdown

DOCS = Path(__file__).parents[1] / "docs"
README, RESULTS = DOCS.parent / "README.md", DOCS / "results" / "README.md"


@pytest.mark.parametrize(
    ("text", "report"),
    [
        (README, "all-drafters-32"),
        (README, "spec-bench"),
        (RESULTS, "spec-bench"),
        (RESULTS, "sweep"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.parent.name,
)
def test_a_table_is_that_of_its_report(text: Path, report: str) -> None:
    data = json.loads((DOCS / "results" / report / "acceptance.json").read_text(encoding="utf-8"))
    assert markdown(data) in text.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "report", sorted(RESULTS.parent.glob("*/latency.json")), ids=lambda path: path.parent.name
)
def test_a_latency_table_is_that_of_its_report(report: Path) -> None:
    data = json.loads(report.read_text(encoding="utf-8"))
    assert latency_markdown(data) in RESULTS.read_text(encoding="utf-8")
    assert short_markdown(data) in README.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "report", sorted(RESULTS.parent.glob("*/crossover.json")), ids=lambda path: path.parent.name
)
def test_a_table_of_many_streams_is_that_of_its_report(report: Path) -> None:
    data = json.loads(report.read_text(encoding="utf-8"))
    assert "\n".join(streams_table(data).markdown()) in RESULTS.read_text(encoding="utf-8")


def test_the_figure_of_losslessness_is_that_of_its_report() -> None:
    report = RESULTS.parent / "lossless" / "lossless.json"
    data = json.loads(report.read_text(encoding="utf-8"))
    assert data["is_lossless"]
    answers, tokens = (sum(row[key] for row in data["rows"]) for key in ("answers", "compared"))
    for text in (README, RESULTS):
        words = " ".join(text.read_text(encoding="utf-8").split())
        assert f"{answers} answers" in words and f"{tokens:,} tokens" in words


def test_every_picture_that_is_shown_is_there() -> None:
    shown = [
        line.partition("](")[2][:-1]
        for line in RESULTS.read_text().splitlines()
        if line[:2] == "!["
    ]
    assert shown
    assert [name for name in shown if not (RESULTS.parent / name).is_file()] == []
