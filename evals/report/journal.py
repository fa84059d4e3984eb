"""Journal: what a long measurement has finished, so that it can be interrupted and go on."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import UsageError


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

    Raises UsageError if the file is of other settings.
    """

    def __init__(self, file: Path | None, settings: Mapping[str, Any]) -> None:
        self._file = file
        self._records: dict[str, Any] = {}
        head = json.dumps({"settings": settings}, sort_keys=True)
        if file is None:
            return
        kept = self._read(file, head) if file.exists() else b""
        try:
            if not kept:
                kept = f"{head}\n".encode()
            file.write_bytes(kept)
            self._log = file.open("ab")
        except OSError as error:
            raise UsageError(f"cannot write {file}: {error.strerror}") from None
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
        """Keep a record; it has reached the disk when this returns."""
        self._records[key] = record
        if self._file is not None:
            line = json.dumps({"key": key, "record": record}, allow_nan=False)
            self._log.write(f"{line}\n".encode())
            self._log.flush()

    def discard(self) -> None:
        """Remove the file: everything is in the results."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _read(self, file: Path, head: str) -> bytes:
        """What can be kept of a file: all whole lines. The last one may have been cut."""
        try:
            lines = file.read_bytes().split(b"\n")[:-1]
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from None
        if not lines:
            return b""
        if lines[0] != head.encode():
            raise UsageError(
                f"{file} is of a run with other settings: remove it or choose another --out"
            )
        for number, line in enumerate(lines[1:], start=2):
            try:
                entry = json.loads(line)
                self._records[entry["key"]] = entry["record"]
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{file}:{number} is damaged: remove the file") from None
        return b"\n".join([*lines, b""])
