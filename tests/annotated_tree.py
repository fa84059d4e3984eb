"""The README's annotated source tree, printed or written from the files' docstrings.

    python tests/annotated_tree.py            prints
    python tests/annotated_tree.py --write    replaces README.md's block between the tree markers

An annotation is the first line of a docstring, or of a C++ file, so that is where to change it.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".hpp", ".cpp")
FOLDERS = ("specdec", "drafters", "kernels", "server", "evals", "tests")
BLOCK = re.compile(r"(<!-- tree -->\n+```\w*\n)(.*?)(```\n+<!-- /tree -->)", re.DOTALL)


def source_files() -> list[Path]:
    """Source files of the six folders, relative to the root, each once, in the tree's order.

    Links are not followed: specdec/drafters is listed as drafters/.
    """
    files: list[Path] = []
    for folder in FOLDERS:
        files += _files_below(ROOT / folder)
    return [path.relative_to(ROOT) for path in files]


def annotation(path: Path) -> str:
    """First line of a file's docstring or comment without its full stop; "" if there is none."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text.partition("\n")[0].removeprefix("// ").removesuffix(".")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return docstring.partition("\n")[0].removesuffix(".")


def render() -> str:
    """The tree as text: a line per folder, and below it its files, indented and annotated."""
    lines: list[str] = []
    shown: Path | None = None
    for path in source_files():
        if path.parent != shown:
            shown = path.parent
            lines.append(f"{shown.as_posix()}/")
        lines.append(f"  {path.name:<24} {annotation(path)}".rstrip())
    return "\n".join(lines) + "\n"


def listed_files(readme: str) -> list[Path]:
    """Source files that the README's tree lists; none where it has no fenced block to hold one."""
    block = BLOCK.search(readme)
    files: list[Path] = []
    folder = Path()
    for line in block[2].splitlines() if block else ():
        name, _, _ = line.strip().partition(" ")
        if name.endswith("/"):
            folder = Path(name)
        elif name.endswith(SUFFIXES):
            files.append(folder / name)
    return files


def write() -> None:
    """Replace the README's tree. Exits with one line where the markers are missing."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    if BLOCK.search(text) is None:
        sys.exit("README.md needs a fenced block between <!-- tree --> and <!-- /tree -->")
    new = BLOCK.sub(lambda block: block[1] + render() + block[3], text)
    readme.write_text(new, encoding="utf-8")


def _files_below(folder: Path) -> list[Path]:
    entries = sorted(folder.iterdir())
    files = [entry for entry in entries if entry.suffix in SUFFIXES and entry.is_file()]
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink() and entry.name != "__pycache__":
            files += _files_below(entry)
    return files


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        print(render(), end="")
