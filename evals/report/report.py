"""Report: what a measurement found, once, for the terminal, for JSON and for a folder of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecdecError, UsageError
from specdec.evals.report.json_text import json_text
from specdec.evals.report.machine import machine_line
from specdec.evals.report.page import html_page
from specdec.evals.report.tables import Table

if TYPE_CHECKING:  # drawn only into a folder, and matplotlib is an extra
    from matplotlib.figure import Figure

DPI = 150


@dataclass(frozen=True)
class Report:
    """One measurement. `name` names its files, `data` is its JSON and begins with `origin()`.

    `lines` are what a reader is to know first, one sentence each; `figures` are drawn when they
    are written, and named like their files. `details` are tables for files alone: too long for a
    terminal.

    Example: `Report("batching", "Static batching", {**origin(), "rows": rows}, tables=(table,))`.
    """

    name: str
    title: str
    data: Mapping[str, Any]
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)
    details: Sequence[Table] = ()

    def text(self) -> str:
        """For a terminal: title, machine, what to know first, tables."""
        return "\n".join(self._lines())

    def json(self) -> str:
        """One object. Raises SpecdecError that says where a number is not finite."""
        return json_text(self.data, indent=1)

    def _lines(self) -> Iterator[str]:
        yield self.title
        if "machine" in self.data:
            yield f"{machine_line(self.data['machine'])}; {self.data['date']}"
        yield from self.lines
        for table in self.tables:
            yield ""
            yield from table.lines()


class ReportFolder:
    """Where a report's files go: NAME.json, a CSV per table, a PNG per figure, NAME.html.

    Without a folder nothing is written. Raises UsageError at once if it cannot be written or
    drawn: a long measurement must not be lost to that.

    Example: `ReportFolder(Path("out"), "batching").write(report)`.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self.folder = folder
        if folder is None:
            return
        if find_spec("matplotlib") is None:
            raise UsageError("--out draws with matplotlib: pip install 'specdec-server[evals]'")
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--out {folder} is a file: name a folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{name}.json"
            was_there = file.exists()
            file.open("ab").close()
            if not was_there:
                file.unlink()  # a run that is interrupted leaves no empty result
        except OSError as error:
            raise UsageError(f"cannot write to --out {folder}: {error.strerror}") from None

    def write(self, report: Report, more: Mapping[str, str] | None = None) -> None:
        """All files, each whole; none is touched before all could be drawn and have their room.

        `more` are texts by the names of their files, which a measurement has beside its report.
        Raises SpecdecError if the disk is full, or if a number in the data is not finite.
        """
        if self.folder is None:
            return
        files = {f"{report.name}.json": (report.json() + "\n").encode()}
        tables = (*report.tables, *report.details)
        for table in tables:
            files[f"{report.name}-{table.name}.csv"] = table.csv().encode()
        pictures = {name: _png(draw()) for name, draw in report.figures.items()}
        for name, png in pictures.items():
            files[f"{report.name}-{name}.png"] = png
        page = html_page(report.title, report.text(), tables, pictures)
        files[f"{report.name}.html"] = page.encode()
        for name, text in (more or {}).items():
            files[name] = text.encode()
        _write(self.folder, files)


def show(report: Report, *, as_json: bool) -> None:
    """Print it as the command was asked to."""
    print(report.json() if as_json else report.text())


def _png(figure: Figure) -> bytes:
    from io import BytesIO

    out = BytesIO()
    figure.savefig(out, dpi=DPI, format="png")
    return out.getvalue()


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    partials = {folder / f".{name}.part": folder / name for name in files}
    try:
        for partial, content in zip(partials, files.values(), strict=True):
            partial.write_bytes(content)
        for partial, file in partials.items():
            partial.replace(file)
    except OSError as error:
        raise SpecdecError(f"cannot write to --out {folder}: {error.strerror}") from None
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)
