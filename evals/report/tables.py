"""Table: rows with a name, for the terminal, for spreadsheets and for pages."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain


@dataclass(frozen=True)
class Table:
    """Rows of cells under column heads; `name` is also the file's. None is a cell without a value.

    Cells are numbers or text; a float is shown with four significant digits, and written to CSV
    as it is. `note` says in one line what the rows mean.

    Example: `print("\\n".join(Table("speed", ("task", "x"), [("chat", 1.234567)]).lines()))`.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    note: str = ""

    def lines(self) -> Iterator[str]:
        """For a terminal: the note, then columns as wide as they must be."""
        if self.note:
            yield self.note
        heads = [column.replace(" ", "-") for column in self.columns]
        yield from table(heads, [[shown(cell) for cell in row] for row in self.rows])

    def markdown(self) -> Iterator[str]:
        """As README and docs have it."""
        for line in chain([self.columns, ["---"] * len(self.columns)], self.rows):
            yield "| " + " | ".join(shown(cell).replace("|", "\\|") for cell in line) + " |"

    def csv(self) -> str:
        """All digits, a line per row."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(["" if cell is None else cell for cell in row] for row in self.rows)
        return text.getvalue()

    def html(self) -> str:
        """A table element with its note as the caption."""
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in self.columns)
        body = "".join(
            "<tr>" + "".join(_html_cell(cell) for cell in row) + "</tr>" for row in self.rows
        )
        caption = f"<caption>{escape(self.note)}</caption>" if self.note else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def shown(cell: object) -> str:
    """A cell as a reader wants it. Example: `shown(1.23456) == "1.235"`, `shown(None) == "-"`."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return "".join(char if char.isprintable() else " " for char in str(cell))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Columns as wide as they must be; text to the left, numbers to the right."""
    lines = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    is_number = [
        all(_is_number(cell) for cell in column) for column in zip(*lines, strict=True)
    ] or [False] * len(head)
    for line in (list(head), *lines):
        cells = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, is_number, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell == "-"
    return True


def _html_cell(cell: object) -> str:
    kind = ' class="n"' if isinstance(cell, int | float) or cell is None else ""
    return f"<td{kind}>{escape(shown(cell))}</td>"
