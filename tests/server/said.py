"""Said: the lines that a process says on stderr, read as they come so that it never waits."""

from __future__ import annotations

import threading
from typing import IO


class Said:
    """Lines from `stream`; each is handed out once.

    Example: `said.next(timeout_s=10)` is the oldest line that was not asked for yet.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lines: list[str] = []
        self._has_ended = False
        self._news = threading.Condition()
        self._may_read = threading.Event()
        self._may_read.set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> str:
        """The next line; empty once the process has closed the stream."""
        with self._news:
            came = self._news.wait_for(lambda: self._lines or self._has_ended, timeout_s)
            assert came, f"nothing was said for {timeout_s} s"
            return self._lines.pop(0) if self._lines else ""

    def pause(self) -> None:
        """Read no more, after at most one line, until `resume`."""
        self._may_read.clear()

    def resume(self) -> None:
        """Read on."""
        self._may_read.set()

    def rest(self, timeout_s: float) -> str:
        """What is said until the stream ends."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "something still holds the stream open"
        lines, self._lines = self._lines, []
        return "".join(lines)

    def _read(self) -> None:
        with self._stream:
            for line in self._stream:
                with self._news:
                    self._lines.append(line)
                    self._news.notify_all()
                self._may_read.wait()
        with self._news:
            self._has_ended = True
            self._news.notify_all()
