"""Journal: an interrupted run goes on, and nothing is taken from a file that is not its own."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.errors import SpecdecError, UsageError
from specdec.evals.report.journal import Journal

SETTINGS = {"rate": 3, "drafters": ["suffix"], "budgets": {8: "few"}}
HELD = """
import sys
from pathlib import Path
from specdec.evals.report.journal import Journal
with Journal(Path(sys.argv[1]), {}) as journal:
    journal.add("a", 1)
    print("ready", flush=True)
    sys.stdin.read()
"""


def write_three(file: Path) -> None:
    with Journal(file, SETTINGS) as journal:
        for key in "abc":
            journal.add(key, {"value": key * 3, "of": [1, 2.5, None]})


def test_without_a_file_records_are_in_memory() -> None:
    with Journal(None, SETTINGS) as journal:
        assert "a" not in journal
        journal.add("a", {"x": 1})
        assert journal["a"] == {"x": 1}
        assert len(journal) == 1
    journal.discard()


def test_a_run_goes_on_with_what_it_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.part.jsonl"
    write_three(file)
    assert capsys.readouterr().err == ""
    with Journal(file, dict(reversed(SETTINGS.items()))) as journal:
        assert [key in journal for key in "abcd"] == [True, True, True, False]
        assert journal["b"] == {"value": "bbb", "of": [1, 2.5, None]}
        journal.add("d", 4)
    assert capsys.readouterr().err == (
        f"going on after 3 finished parts; remove {file} to start anew\n"
    )
    with Journal(file, SETTINGS) as journal:
        assert len(journal) == 4
    journal.discard()
    assert not file.exists()
    journal.discard()


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path: Path, data: st.DataObject) -> None:
    """A kill in the middle of a line, or of the first one."""
    file = tmp_path / "any.part.jsonl"
    file.unlink(missing_ok=True)
    write_three(file)
    content = file.read_bytes()
    kept = content[: data.draw(st.integers(0, len(content)))]
    file.write_bytes(kept)
    num_whole = max(0, kept.count(b"\n") - 1)
    with Journal(file, SETTINGS) as journal:
        assert [key for key in "abc" if key in journal] == list("abc"[:num_whole])
        for key in "abc"[num_whole:]:
            journal.add(key, {"value": key * 3, "of": [1, 2.5, None]})
    assert file.read_bytes() == content


def test_a_run_of_other_settings_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "x.part.jsonl"
    write_three(file)
    content = file.read_bytes()
    for wrong in ({}, {**SETTINGS, "rate": 4}):
        with pytest.raises(UsageError, match=r"x\.part\.jsonl is of a run with other settings"):
            Journal(file, wrong)
    assert file.read_bytes() == content


def test_a_run_that_finished_nothing_leaves_no_claim(tmp_path: Path) -> None:
    file = tmp_path / "load.part.jsonl"
    with Journal(file, SETTINGS):
        pass
    with Journal(file, {"other": 1}) as journal:
        journal.add("a", 1)
    with pytest.raises(UsageError, match="other settings"):
        Journal(file, SETTINGS)


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "x.part.jsonl"
    for content in (b"my notes", b"my notes\n", b"\xff\n"):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="remove"):
            Journal(file, SETTINGS)
        assert file.read_bytes() == content


@pytest.mark.parametrize(
    "damage", [b"{", b"[]", b'{"key": "b"}', b'{"key": [], "record": 1}', b"\xff", b"[" * 100_000]
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "x.part.jsonl"
    write_three(file)
    lines = file.read_bytes().split(b"\n")
    lines[2] = damage
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(UsageError, match=r"x\.part\.jsonl:3 is damaged: remove the file"):
        Journal(file, SETTINGS)
    with pytest.raises(UsageError, match=":3 is damaged"):  # the one before let go of the file
        Journal(file, SETTINGS)


def test_where_it_cannot_be_written_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*: Is a directory"):
        Journal(tmp_path, SETTINGS)
    with pytest.raises(UsageError, match=r"cannot write .*: No such file or directory"):
        Journal(tmp_path / "none" / "x", SETTINGS)


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "x.part.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        content = file.read_bytes()
        with pytest.raises(UsageError, match=r"another run is writing .*x\.part\.jsonl: wait"):
            Journal(file, {})
        assert file.read_bytes() == content
        other.kill()
    with Journal(file, {}) as journal:  # its lock went with it
        assert journal["a"] == 1


@contextmanager
def room_of(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this; Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_in_one_line_and_the_run_can_go_on(tmp_path: Path) -> None:
    file = tmp_path / "x.part.jsonl"
    with Journal(file, SETTINGS) as journal:
        journal.add("a", "A" * 1000)
        with room_of(file.stat().st_size + 100), pytest.raises(SpecdecError) as caught:
            journal.add("b", "B" * 1000)
    assert str(caught.value) == (
        f"cannot write {file}: File too large; mend that, and the same command goes on where it "
        "stopped"
    )
    with Journal(file, SETTINGS) as journal:
        assert "a" in journal
        assert "b" not in journal
        journal.add("b", "B" * 1000)
    with Journal(file, SETTINGS) as journal:
        assert len(journal) == 2


def test_a_number_that_is_not_finite_is_refused_before_it_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "x.part.jsonl"
    with Journal(file, SETTINGS) as journal:
        with pytest.raises(SpecdecError, match=r"^record\.rows\[1\]\.s was measured as nan"):
            journal.add("a", {"rows": [{"s": 1.0}, {"s": float("nan")}]})
        assert "a" not in journal
    with Journal(file, SETTINGS) as journal:
        assert len(journal) == 0
