"""The acceptance tables of the README are what the kept reports say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.evals.acceptance.tables import markdown

ROOT = Path(__file__).parents[1]
REPORTS = sorted((ROOT / "docs" / "acceptance").glob("*.json"))


def test_there_are_reports() -> None:
    assert {file.stem for file in REPORTS} >= {"greedy-32", "greedy-8"}


@pytest.mark.parametrize("file", REPORTS, ids=lambda file: file.stem)
def test_readme_holds_the_table(file: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert markdown(json.loads(file.read_text(encoding="utf-8"))) in readme
