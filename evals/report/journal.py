"""Journal: what a long measurement has finished, so that it can be interrupted and go on."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError, UsageError
from specdec.evals.report.json_text import json_text

_HEAD = b'{"settings": '


class Journal:
    """Records by key, each on disk as soon as it is added; ready for JSON.

    A run that is interrupted leaves its file, and the same command goes on with it. `settings` are
    whatever decides the records. Without a file, records are only kept in memory.

    Example:
        with Journal(out / "load.part.jsonl", {"rate": 3}) as journal:
            for key in keys:
                if key not in journal:
                    journal.add(key, measure(key))
        journal.discard()  # the results are written

    Raises UsageError if the file is of other settings, damaged, or in use by another run.
    """

    def __init__(self, file: Path | None, settings: Mapping[str, Any]) -> None:
        self._file = file
        self._records: dict[str, Any] = {}
        head = json.dumps(json.loads(json_text({"settings": settings})), sort_keys=True)
        if file is None:
            return
        try:
            self._log = FileIO(file, "a+")
        except OSError as error:
            raise UsageError(f"cannot write {file}: {error.strerror}") from None
        try:
            self._lock(file)
            kept = self._read(file, head)
            self._log.truncate(kept)
            if not kept:
                self._write(head)
        except BaseException:
            self._log.close()
            raise
        if self._records:
            print(
                f"going on after {len(self._records)} finished parts; remove {file} to start anew",
                file=sys.stderr,
            )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._log.close()

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> Any:
        return self._records[key]

    def __len__(self) -> int:
        return len(self._records)

    def add(self, key: str, record: Any) -> None:
        """Keep a record; it has reached the disk when this returns.

        Raises SpecdecError if the disk is full, or if a number in it is not finite.
        """
        line = json_text({"key": key, "record": record})
        self._records[key] = record
        if self._file is not None:
            self._write(line)

    def discard(self) -> None:
        """Remove the file: everything is in the results."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _lock(self, file: Path) -> None:
        try:
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another run is writing {file}: wait for it, or choose another --out"
            ) from None
        except OSError:  # a file system without locks
            return

    def _write(self, line: str) -> None:
        rest = f"{line}\n".encode()
        try:
            while rest:
                rest = rest[self._log.write(rest) :]
            os.fsync(self._log.fileno())
        except OSError as error:
            raise SpecdecError(
                f"cannot write {self._file}: {error.strerror}; mend that, and the same command "
                "goes on where it stopped"
            ) from None

    def _read(self, file: Path, head: str) -> int:
        """Take in all whole lines; the last one may have been cut. How many bytes they have."""
        try:
            self._log.seek(0)
            content = self._log.readall()
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from None
        lines = content.split(b"\n")[:-1]
        if not lines:
            if content and not head.encode().startswith(content):
                raise UsageError(
                    f"{file} is not of a measurement: remove it or choose another --out"
                )
            return 0
        if len(lines) == 1 and lines[0].startswith(_HEAD):
            return 0  # nothing was finished: whoever comes may have the file
        if lines[0] != head.encode():
            raise UsageError(
                f"{file} is of a run with other settings: remove it or choose another --out"
            )
        for number, line in enumerate(lines[1:], start=2):
            try:
                entry = json.loads(line)
                self._records[entry["key"]] = entry["record"]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UsageError(f"{file}:{number} is damaged: remove the file") from None
        return sum(len(line) + 1 for line in lines)
