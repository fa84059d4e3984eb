"""Docs: the files, links, commands, options and imports that README and docs name exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from specdec.cli import app
from tests.annotated_tree import BLOCK, ROOT, source_files

# Records of a day keep the names of that day.
RECORDS = {"docs/lab-log.md", "CHANGELOG.md"}
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    if path.relative_to(ROOT).as_posix() not in RECORDS
)
FILES_OF_OTHERS = {"echo_drafter.py", "prepare_data.py", "llama.cpp"}  # a reader's; programs
OPTIONS_OF_OTHERS = {"--fix", "--write", "--save-result"}  # ruff's, a script's, vLLM's
PROMPT = re.compile(r"(?:\.venv/bin/)?(?=specdec\b)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"")


def text_of(page: str) -> str:
    """A page without README's tree, which has a test of its own."""
    return BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))


def prose_of(page: str) -> str:
    return FENCE.sub("", text_of(page))


def slugs_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def command_lines(page: str) -> Iterator[str]:
    """Whole lines of fenced blocks and of inline code that call specdec, without comments."""
    for language, block in FENCE.findall(text_of(page)):
        if language in ("", "sh", "text"):
            for line in block.replace("\\\n", " ").splitlines():
                if match := PROMPT.match(line):
                    yield line[match.end() :]
    for code in CODE.findall(prose_of(page)):
        if match := PROMPT.match(code):
            yield code[match.end() :]


@cache
def specdec() -> Any:
    """The command line as typer makes it: groups with `commands`, commands with `params`."""
    return typer.main.get_command(app)


def options_of(command: Any) -> set[str]:
    names = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    return {"--help", *names}


def all_options(command: Any) -> set[str]:
    found = options_of(command)
    for child in getattr(command, "commands", {}).values():
        found |= all_options(child)
    return found


def complaint(line: str) -> str:
    """What is wrong with a command line; "" if its commands and options exist."""
    command = specdec()
    words = shlex.split(line, comments=True)[1:]
    while words and hasattr(command, "commands"):
        name, *rest = words
        if name.startswith("-"):
            break
        if name not in command.commands:
            return f"no command {name}"
        command, words = command.commands[name], rest
    known = options_of(command)
    wrong = [word for word in words if word.startswith("--") and word not in known]
    return f"no option {', '.join(wrong)}" if wrong else ""


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_exists(page: str) -> None:
    files = {path.as_posix() for path in source_files()}
    names = {path.name for path in source_files()}
    named = re.findall(r"[\w./-]*\w\.(?:py|[ch]pp)\b", prose_of(page))
    missing = [
        name for name in named if name not in (files if "/" in name else names) | FILES_OF_OTHERS
    ]
    assert missing == []


@pytest.mark.parametrize("page", [*PAGES, *sorted(RECORDS)])
def test_every_link_leads_somewhere(page: str) -> None:
    missing = []
    for link in map("".join, LINK.findall(prose_of(page))):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in slugs_of(target)):
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_line_is_one_of_ours(page: str) -> None:
    wrong = [f"{line}: {why}" for line in command_lines(page) if (why := complaint(line))]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_every_option_that_is_named_exists(page: str) -> None:
    known = all_options(specdec()) | OPTIONS_OF_OTHERS
    words = " ".join(CODE.findall(prose_of(page))).split()
    named = [re.split(r"[=,]", word)[0] for word in words]
    wrong = [name for name in named if name.startswith("--") and name not in known]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_python_imports_what_there_is(page: str) -> None:
    for language, block in FENCE.findall(text_of(page)):
        if language not in ("python", "py"):
            continue
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("specdec"):
                module = importlib.import_module(str(node.module))
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_every_metric_that_is_named_is_exported() -> None:
    source = (ROOT / "server" / "prometheus.py").read_text(encoding="utf-8")
    named = re.findall(r"(?:specdec|vllm):[a-z_]+[a-z]\b", text_of("docs/server.md"))
    assert named
    assert [name for name in named if f'"{name.removesuffix("_total")}"' not in source] == []


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for many in extras.values() for one in many)]
    names = [re.split(r"[\[<>=;! ]", one)[0] for one in wanted]
    reasons = (ROOT / "docs" / "adr" / "0002-dependencies.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|([^|]*)\|([^|]*)\|", reasons, re.MULTILINE)
    cells = {name.strip() for row in rows for cell in row for name in cell.split(",")}
    given = {*names, *extras} - {project["name"]}
    assert sorted(given - cells) == []
