"""Progress: how much is left, on terminals and elsewhere"""

from __future__ import annotations

import sys
from io import StringIO

import pytest
from rich.console import Console

from specdec.evals.report.progress import duration, progress

# --- progress ---


def test_where_there_is_no_terminal_a_line_now_and_then_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with progress(5) as advance:
        for seconds, name in ((12, "a"), (20, "b"), (21, "c"), (84, "d"), (100, "e")):
            now = seconds
            advance(name)
    assert capsys.readouterr().err.splitlines() == [
        "1/5: a",  # nothing is finished yet
        "4/5: d; 56 s left",  # 84 s for three, two are left
        "5/5: e; 25 s left",
    ]
    assert [duration(89), duration(90)] == ["89 s", "2 min"]


def test_on_a_terminal_names_are_not_taken_for_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]  # a terminal for once
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(
        "rich.console.Console", lambda **_: Console(file=screen, force_terminal=True, width=200)
    )
    with progress(3) as advance:
        for name in ("one", "two", "[/red] three"):
            advance(name)
    said = screen.getvalue()
    assert "measuring" in said
    assert "[/red] three" in said
    assert "67%" in said
