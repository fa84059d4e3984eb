"""Report: one measurement as text, JSON, CSV, pictures and a page, whole or not at all."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specdec.errors import SpecdecError, UsageError
from specdec.evals.report.compared import Compared
from specdec.evals.report.intervals import Interval
from specdec.evals.report.machine import machine_line, origin
from specdec.evals.report.report import Report, ReportFolder, show
from specdec.evals.report.spread import percentile
from specdec.evals.report.style import bar_style, line_style, new_figure, tidy
from specdec.evals.report.tables import Table, shown
from tests.evals.test_journal import room_of

NASTY = '<b>&"|,\n\x1b[2Jé'
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Checks that elements are closed in order, and keeps what they refer to and say."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.references: list[str] = []
        self.elements: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.references += [str(v) for name, v in attrs if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def drawn() -> Figure:
    figure = new_figure("Some", DATA)
    axes = figure.subplots()
    axes.plot([1, 2], [3, 4], **line_style(0))
    axes.bar([1, 2], [3, 4], **bar_style(1))
    tidy(axes)
    return figure


@pytest.mark.parametrize("width", [5.0, 8.0, 11.2])
def test_a_title_is_not_wider_than_its_figure(width: float) -> None:
    machine = {**DATA["machine"], "versions": {f"a-long-package-{n}": "2026.4.1" for n in range(6)}}
    figure = new_figure("Words and more of them " * 8, {**DATA, "machine": machine}, width=width)
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]  # matplotlib's is untyped
    [title] = figure.texts
    bounds = title.get_window_extent()
    assert bounds.x0 >= 0 and bounds.x1 <= figure.bbox.width


TABLE = Table("rows", ("task", "x"), [(NASTY, 1.23456789), ("b", None)], note="What <they> mean.")
DATA = {**origin(), "rows": [1]}


def report(data: Any = None, draw: Callable[[], Figure] = drawn) -> Report:
    figures, details = {"by-task": draw}, (Table("long", ("x",), [(1,)]),)
    return Report("some", "Some <title>", data or DATA, ("First.",), (TABLE,), figures, details)


# --- tables ---


def test_a_table_for_a_terminal_has_columns_and_no_control_characters() -> None:
    lines = list(Table("t", ("a task", "n"), [("chat", 1.5), (NASTY, -20)], note="Note.").lines())
    nasty = '<b>&"|, ' + " [2Jé"
    assert lines == [
        "Note.",
        f"{'a-task':{len(nasty)}}    n",
        f"{'chat':{len(nasty)}}  1.5",
        f"{nasty}  -20",
    ]


def test_columns_of_numbers_are_to_the_right_in_any_notation() -> None:
    rows = [(1e-7, "1"), (None, "x"), (2.0, "300")]
    assert list(Table("t", ("p", "name"), rows).lines()) == [
        "    p  name",
        "1e-07  1",
        "    -  x",
        "    2  300",
    ]
    assert list(Table("t", ("p", "name"), []).lines()) == ["p  name"]


def test_cells_are_shown_as_readers_want_them() -> None:
    cells = (None, 1.23456, 12345.678, -0.0001234567, 7, True, "a")
    assert [shown(cell) for cell in cells] == [
        *("-", "1.235", "12346", "-0.0001235", "7", "True", "a")
    ]


def test_markdown_keeps_bars_within_their_cells() -> None:
    assert list(Table("t", ("a|b", "n"), [("x|y\nz", 1.0)]).markdown()) == [
        "| a\\|b | n |",
        "| --- | --- |",
        "| x\\|y z | 1 |",
    ]


@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_characters="\0\r")), st.floats(allow_nan=False)),
        max_size=4,
    )
)
def test_csv_is_read_back_with_all_digits(rows: list[tuple[str, float]]) -> None:
    text = Table("t", ("a,b", "x"), rows).csv()
    head, *found = csv.reader(StringIO(text, newline=""))
    assert head == ["a,b", "x"]
    assert [(name, float(x)) for name, x in found] == rows
    assert Table("t", ("x",), [(None,)]).csv() == 'x\n""\n'


def test_html_says_the_cells_and_nothing_else() -> None:
    page = Page(TABLE.html())
    assert page.elements == [
        *("table", "caption", "thead", "tr", "th", "th", "tbody"),
        *("tr", "td", "td", "tr", "td", "td"),
    ]
    assert page.text == ["What <they> mean.", "task", "x", '<b>&"|,  [2Jé', "1.235", "b", "-"]
    assert '<td class="n">1.235</td>' in TABLE.html()


# --- a report, shown ---


def test_text_is_title_machine_lines_and_tables() -> None:
    lines = report().text().splitlines()
    assert lines[:4] == [
        "Some <title>",
        f"{machine_line(DATA['machine'])}; {DATA['date']}",
        "First.",
        "",
    ]
    assert lines[4:] == list(TABLE.lines())
    assert Report("x", "Title", {}).text() == "Title"


def test_it_is_printed_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    show(report(), as_json=True)
    assert json.loads(capsys.readouterr().out) == DATA
    show(report(), as_json=False)
    assert capsys.readouterr().out == report().text() + "\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_named_and_nothing_is_written(
    tmp_path: Path, value: float
) -> None:
    wrong = report({**DATA, "rows": [{"speed": 1.0}, {"speed": (1.0, value)}]})
    reason = rf"^rows\[1\]\.speed\[1\] was measured as {value}, which is no number"
    with pytest.raises(SpecdecError, match=reason):
        show(wrong, as_json=True)
    with pytest.raises(SpecdecError, match=reason):
        ReportFolder(tmp_path, "some").write(wrong)
    assert list(tmp_path.iterdir()) == []


def test_an_entry_to_compare_is_json() -> None:
    entry = Compared("suffix", "tokens", Interval(1.5, 1, 2), False, {"81": (3, 2)}).as_json()
    assert json.loads(json.dumps(entry)) == {
        "of": "suffix",
        "figure": "tokens",
        "value": 1.5,
        "low": 1,
        "high": 2,
        "is_higher_better": False,
        "parts": {"81": [3, 2]},
    }


# --- its files ---


def test_a_folder_gets_every_file(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    folder = ReportFolder(out, "some")
    assert list(out.iterdir()) == [], "an interrupted run leaves no empty result"
    for _ in range(2):  # once more over what is there
        folder.write(report())
        assert {file.name for file in out.iterdir()} == {
            *("some.json", "some.html", "some-rows.csv", "some-long.csv", "some-by-task.png")
        }
    assert json.loads((out / "some.json").read_text()) == DATA
    assert (out / "some-rows.csv").read_text() == TABLE.csv()
    assert matplotlib.image.imread(out / "some-by-task.png").shape == (750, 1200, 4)


def test_the_page_is_whole_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    ReportFolder(tmp_path, "some").write(report({**DATA, "command": "--url http://x/"}))
    text = (tmp_path / "some.html").read_text(encoding="utf-8")
    page = Page(text)
    assert text.startswith("<!doctype html>\n")
    assert [page.elements.count(tag) for tag in ("img", "table")] == [1, 2]
    assert [reference[:22] for reference in page.references] == ["data:image/png;base64,"]
    assert not {"script", "link", "iframe", "b"} & set(page.elements)
    assert "@import" not in text and "url(" not in text
    said = [line for line in page.text if line.strip()]
    assert {"Some <title>", "First.", "by task"} <= set(said)
    assert said.count("Some <title>") == 2  # of the page, and its head line


def test_without_a_folder_nothing_is_drawn() -> None:
    def draw() -> Figure:
        raise AssertionError

    ReportFolder(None, "some").write(report(draw=draw))


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=r"^--out .*file is a file: name a folder$"):
        ReportFolder(file, "some")
    with pytest.raises(UsageError, match=r"^cannot write to --out .*: Not a directory$"):
        ReportFolder(file / "below", "some")


def test_a_folder_that_cannot_be_made_or_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^cannot write to --out /sys/none: [A-Z].*$"):
        ReportFolder(Path("/sys/none"), "some")
    (tmp_path / "some.json").mkdir()
    with pytest.raises(UsageError, match=r"^cannot write to --out .*: Is a directory$"):
        ReportFolder(tmp_path, "some")


def test_a_missing_matplotlib_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'specdec-server\[evals\]'"):
        ReportFolder(tmp_path / "out", "some")
    assert not (tmp_path / "out").exists()
    ReportFolder(None, "some")


@pytest.mark.parametrize("fault", ["drawing", "room"])
def test_a_fault_while_writing_leaves_the_files_before(tmp_path: Path, fault: str) -> None:
    def draw() -> Figure:
        raise SpecdecError("cannot be drawn")

    folder = ReportFolder(tmp_path, "some")
    folder.write(report())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    new = report({**DATA, "rows": [2]}, draw if fault == "drawing" else drawn)
    reason = {"drawing": "cannot be drawn", "room": r"cannot write to --out .*: File too large"}
    with (
        nullcontext() if fault == "drawing" else room_of(2000),
        pytest.raises(SpecdecError, match=reason[fault]),
    ):
        folder.write(new)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


# --- percentiles ---


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(0, 100))
def test_a_percentile_is_the_least_value_with_so_many_below(
    values: list[int], percent: int
) -> None:
    def has_enough(value: int) -> bool:
        return 100 * sum(other <= value for other in values) >= percent * len(values)

    assert percentile(values, percent) == min(filter(has_enough, values))


def test_lines_and_bars_differ_beyond_the_colours() -> None:
    for style in (line_style, bar_style):
        assert len({repr(style(index)) for index in range(49)}) == 49
        assert len({style(index)["color"] for index in range(7)}) == 7
