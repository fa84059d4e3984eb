"""The repository keeps the shape that ADR 0001 and the style rules give it."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.annotated_tree import ROOT, annotation, listed_files, source_files
from tests.import_graph import file_graph, folder_graph, reachable

LINKED = ("drafters", "kernels", "server", "evals")
MAX_LINES = 350

# The unambiguous ones of docs/glossary.md's "do not say" column, matched as whole words.
FORBIDDEN_NAMES = (
    "proposer", "speculator", "gamma", "posterior", "evaluate_posterior", "retrieve_indices",
    "cart_candidates", "medusa_attn_mask", "num_spec_tokens", "num_speculative_tokens",
)  # fmt: skip

# `import specdec.engine` must work on a GPU machine that has torch and no server.
NOT_IN_THE_ENGINE = (
    "starlette", "uvicorn", "sse_starlette", "msgspec", "typer", "rich", "transformers", "triton",
)  # fmt: skip


@pytest.mark.parametrize("folder", LINKED)
def test_folder_is_linked_into_the_package(folder: str) -> None:
    link = ROOT / "specdec" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"
    assert (link / "__init__.py").samefile(ROOT / folder / "__init__.py")


def test_links_are_committed_as_links() -> None:
    """A checkout with core.symlinks=false commits text files that say "../drafters"."""
    if not (ROOT / ".git").exists():
        return  # an unpacked archive; the test above has seen the links themselves
    listing = _git("ls-files", "--stage", *(f"specdec/{folder}" for folder in LINKED))
    modes = {line.split("\t")[1]: line.split()[0] for line in listing.splitlines()}
    assert modes == {f"specdec/{folder}": "120000" for folder in LINKED}


@pytest.mark.parametrize("folder", ["specdec", *LINKED])
def test_init_holds_only_a_docstring(folder: str) -> None:
    """`import specdec.engine` runs `specdec/__init__.py`: whatever stands there, everyone pays."""
    docstring, *rest = ast.parse((ROOT / folder / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(docstring.value, ast.Constant)
    if folder == "kernels":  # transformers reads the version of whatever is named `kernels`
        (version,) = rest
        assert isinstance(version, ast.Assign)
        assert ast.unparse(version.targets[0]) == "__version__"
    else:
        assert rest == []


def test_repository_root_is_not_importable() -> None:
    """With the root on sys.path, `import kernels` in transformers would find our folder."""
    assert ROOT not in {Path(entry).resolve() for entry in sys.path}
    for folder in LINKED:
        spec = importlib.util.find_spec(folder)
        places = [] if spec is None else list(spec.submodule_search_locations or [])
        assert ROOT / folder not in {Path(place).resolve() for place in places}


def test_every_package_folder_has_an_init() -> None:
    """setuptools ships only folders with an `__init__.py`."""
    folders = {path.parent for path in _python_files() if path.parts[0] != "tests"}
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()] == []


def test_every_file_says_what_it_is() -> None:
    silent = [str(path) for path in source_files() if not annotation(path)]
    assert silent == []


def test_no_file_is_too_long() -> None:
    lengths = {path: len(_read(path).splitlines()) for path in source_files()}
    too_long = [f"{path}: {length}" for path, length in lengths.items() if length > MAX_LINES]
    assert not too_long, f"over {MAX_LINES} lines: {', '.join(too_long)}"


def test_readme_tree_equals_the_real_tree() -> None:
    listed = set(listed_files(_read(Path("README.md"))))
    real = set(source_files())
    problems = [f"not listed: {path}" for path in sorted(real - listed)]
    problems += [f"does not exist: {path}" for path in sorted(listed - real)]
    if problems:
        pytest.fail(
            "\n".join([*problems, "Run: python tests/annotated_tree.py --write"]), pytrace=False
        )


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = file_graph(within_functions=False)
    assert graph["specdec/scheduler.py"] >= {"specdec/plan.py", "specdec/request.py"}
    assert [file for file in graph if file in reachable(graph, file)] == []


def test_no_folder_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count too: they do not change what stands on what."""
    folders = folder_graph(file_graph())
    assert folders["specdec"] == {"kernels"}
    assert folders["server"] == {"specdec"}
    assert [folder for folder in folders if folder in reachable(folders, folder)] == []


def test_names_follow_the_glossary() -> None:
    words = "|".join(FORBIDDEN_NAMES)
    pattern = re.compile(rf"(?:^|_)(?:{words})s?(?:_|$)")
    found = [
        f"{path}:{line} {name}"
        for path in _python_files()
        for name, line in _defined_names(ast.parse(_read(path)))
        if pattern.search(_snake_case(name))
    ]
    assert not found, f"docs/glossary.md has other names for: {', '.join(found)}"


def test_engine_imports_nothing_of_the_server() -> None:
    code = f"""\
import sys
import specdec.engine
print([name for name in {NOT_IN_THE_ENGINE} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def _python_files() -> list[Path]:
    return [path for path in source_files() if path.suffix == ".py"]


def _read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def _snake_case(name: str) -> str:
    """`NgramProposer` -> `ngram_proposer`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _defined_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that a file itself gives: what it only uses of others' may be called anything."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.alias(asname=str(name)):
                yield name, node.lineno
