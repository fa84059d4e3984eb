"""The import graph: which file imports which, which folder which, and a picture of that.

What only types need is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.annotated_tree import ROOT, source_files

Graph = dict[str, set[str]]


def file_graph(*, within_functions: bool = True) -> Graph:
    """By file, relative to the root, the files of the package that it imports.

    Example: `file_graph()["server/sse.py"]`.
    """
    files = [path for path in source_files() if path.suffix == ".py" and path.parts[0] != "tests"]
    by_module = {_module(path): path.as_posix() for path in files}
    graph: Graph = {}
    for path in files:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        names = _imported(tree, within_functions)
        graph[path.as_posix()] = {by_module[name] for name in names if name in by_module}
    return graph


def folder_graph(graph: Graph) -> Graph:
    """The same between folders, without those edges that others imply."""
    folders: Graph = {}
    for file, imported in graph.items():
        own = _folder(file)
        folders.setdefault(own, set()).update(set(map(_folder, imported)) - {own})
    return {
        folder: {
            near
            for near in imported
            if not any(near in reachable(folders, other) for other in imported - {near})
        }
        for folder, imported in folders.items()
    }


def reachable(graph: Graph, start: str) -> set[str]:
    """All that `start` imports, directly or not; itself only if it stands in a circle."""
    found: set[str] = set()
    left = [start]
    while left:
        for node in graph.get(left.pop(), set()) - found:
            found.add(node)
            left.append(node)
    return found


def picture(folders: Graph) -> str:
    """The folders in Mermaid; an arrow points at what is imported."""
    arrows = [
        f"    {_name(folder)}[{folder}] --> {_name(near)}[{near}]"
        for folder in sorted(folders)
        for near in sorted(folders[folder])
    ]
    return "\n".join(["graph TD", *arrows])


def _imported(tree: ast.AST, within_functions: bool) -> Iterator[str]:
    """Names of modules; of `from a import b` both a.b and a, as b may be either."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not within_functions:
                continue
        yield from _imported(node, within_functions)


def _module(path: Path) -> str:
    parts = [part for part in path.with_suffix("").parts if part != "__init__"]
    return ".".join(parts if parts[0] == "specdec" else ["specdec", *parts])


def _folder(file: str) -> str:
    """The command line stands above all that it calls, so it is a box of its own."""
    return "cli" if file == "specdec/cli.py" else file.rpartition("/")[0]


def _name(folder: str) -> str:
    return folder.replace("/", "_")
