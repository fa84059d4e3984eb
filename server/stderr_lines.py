"""say: a line on stderr that nobody ever waits for."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading

MAX_WAITING = 1000  # lines; where nobody reads stderr the rest is lost, and the server goes on
GOODBYE_S = 0.5


class StderrLines:
    """Writes lines from a thread of its own: a reader that has stopped must not stop the server.

    Past Python's own buffer, which a thread that is stuck would hold locked at the exit.

    Example: `StderrLines().say("stopping")`.
    """

    def __init__(self) -> None:
        self._waiting: queue.Queue[bytes] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def say(self, line: str) -> None:
        """Write a line soon, or lose it."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(f"{line}\n".encode(errors="backslashreplace"))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, daemon=True)
                self._thread.start()

    def flush(self, timeout_s: float = GOODBYE_S) -> None:
        """Wait until all is written, but not long."""
        done = threading.Thread(target=self._waiting.join, daemon=True)
        done.start()
        done.join(timeout_s)

    def _write(self) -> None:
        while True:
            rest = self._waiting.get()
            with contextlib.suppress(OSError, ValueError):  # closed: there is nobody to tell
                while rest:
                    rest = rest[os.write(sys.stderr.fileno(), rest) :]
            self._waiting.task_done()


_LINES = StderrLines()
say = _LINES.say
flush = _LINES.flush
