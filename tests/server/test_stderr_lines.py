"""Lines on stderr: nobody waits for who reads them, and a stream that is closed ends nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.server.stderr_lines import MAX_WAITING, StderrLines
from tests.server.conftest import RunningServer, make_folder

LINE = "x" * 1000


class Stream:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor


def test_lines_come_whole_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stderr", Stream(writing))
    lines = StderrLines()
    for number in range(50):
        lines.say(f"line {number} \ud800")
    lines.flush(timeout_s=10)
    os.close(writing)
    with os.fdopen(reading, "rb") as read:
        assert read.read().decode() == "".join(f"line {n} \\ud800\n" for n in range(50))


def test_a_pipe_that_nobody_reads_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stderr", Stream(writing))
    lines = StderrLines()
    for _ in range(MAX_WAITING + 500):  # much more than a pipe holds
        lines.say(LINE)
    lines.flush(timeout_s=0.1)
    os.close(reading)  # the thread that waited there goes on, and finds nobody
    lines.flush(timeout_s=10)
    os.close(writing)


def test_a_closed_stream_is_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Stream(-1))
    lines = StderrLines()
    lines.say("a line")
    lines.flush(timeout_s=10)
    lines.say("another")
    lines.flush(timeout_s=10)


def test_a_server_serves_and_ends_while_its_log_is_stuck(tmp_path: Path) -> None:
    running = RunningServer(make_folder(tmp_path), access_log=True)
    running.wait_ready()
    running.said.pause()
    for _ in range(1200):  # some 180 bytes each: three times what the pipe holds
        assert running.get("/version").status == 200
    running.process.terminate()
    assert running.process.wait(timeout=10) == 0
    running.said.resume()
    running.end()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_reason_to_fail(closed: str, tmp_path: Path) -> None:
    command = f"specdec info --json {closed}; echo code $? > {tmp_path}/code"
    subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert (tmp_path / "code").read_text() == "code 0\n"
