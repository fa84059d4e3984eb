"""ChildProcess: a process of our own that holds one end of a socket pair; it leaves no zombie."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

LOOK_S = 0.01


class ChildProcess:
    """Runs a command with a descriptor as its last argument, in a process group of its own.

    Raises OSError where the system does not start it.
    Example: `await ChildProcess(("true",), sock.fileno()).ended(5.0)` is "ended with exit code 0".
    """

    def __init__(self, command: Sequence[str], fd: int) -> None:
        self._process = subprocess.Popen(
            [*command, str(fd)],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            process_group=0,  # a terminal's Ctrl-C reaches the server alone
        )

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self._process.poll() is None

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill it and what it has started."""
        if self.is_alive:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def ended(self, wait_s: float) -> str:
        """Wait for its end, and kill it after `wait_s` seconds; returns how it ended.

        Looks instead of waiting in a thread, all of which slow requests may hold.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        while (code := self._process.poll()) is None:
            if clock() >= deadline:
                self.kill()
            await asyncio.sleep(LOOK_S)
        if code >= 0:
            return f"ended with exit code {code}"
        hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
        return f"was killed by signal {-code}{hint}"
