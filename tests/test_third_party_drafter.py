"""A drafter of somebody else's: the one that docs/drafters.md shows, installed from its package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs" / "drafters.md"
RUN = """
import json
from specdec.drafting import available_drafters
from specdec.params import SamplingParams
from specdec.request import Request
from tests.toy import run_all, toy_engine

assert "echo" in available_drafters()
tokens = {}
for names in ("none", "echo", "echo,ngram"):
    prompt = (1, 2, 0, 1, 2, 0, 1)  # the toy's tokenizer has no newline: token 0 stands for it
    request = Request(names, prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    run_all(toy_engine(drafter_name=names), [request])
    tokens[names] = request.output_ids
    drafted = request.stats.drafted_by_source
assert tokens["none"] == tokens["echo"] == tokens["echo,ngram"]
print(json.dumps(drafted))
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the documentation, installed beside nothing else."""
    source, site = tmp_path_factory.mktemp("echo_drafter"), tmp_path_factory.mktemp("site")
    (module,), (project,) = blocks("python"), blocks("toml")
    (source / "echo_drafter.py").write_text(module, encoding="utf-8")
    (source / "pyproject.toml").write_text(project, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    return site


def test_the_documented_drafter_is_short() -> None:
    (module,) = blocks("python")
    assert len(module.splitlines()) <= 40


def test_a_drafter_from_another_package_drafts(installed: Path) -> None:
    root = DOCS.parents[1]
    path = os.pathsep.join((str(installed), str(root)))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    result = subprocess.run(
        [sys.executable, "-c", RUN], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert '"echo"' in result.stdout


def test_without_the_package_it_is_unknown() -> None:
    command = [sys.executable, "-m", "specdec.cli", "generate", "--drafter", "echo", "Hi"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "unknown drafter 'echo'" in result.stderr
