"""Served: a measurement that is killed leaves no server behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HOLDER = """
import subprocess, sys, time
from specdec.evals.load.served import _end_with_parent
child = subprocess.Popen(["sleep", "600"], preexec_fn=_end_with_parent)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells children of a parent's end")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_measurement_takes_its_server_with_it(how: signal.Signals) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    holder.send_signal(how)
    holder.communicate()
    try:
        deadline = time.monotonic() + 10
        while is_running(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_running(child)
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)


def is_running(process: int) -> bool:
    """Whether it is there, and not dead and waiting for somebody to ask how it ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
