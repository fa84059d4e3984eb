"""Checkpoints: what is found, what is refused, and what weights hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from specdec.checkpoints import load_config, open_weights, resolve, verify
from specdec.errors import CheckpointError
from specdec.gguf_conversion import INTEGERS


def model_folder(folder: Path, weights: str = "model.safetensors", **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / weights).write_bytes(b"weights")
    return folder


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "mine")
    assert resolve(str(folder)) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/mine") == folder
    monkeypatch.chdir(tmp_path.parent)
    assert resolve(f"{tmp_path.name}/mine") == Path(tmp_path.name) / "mine"  # not a hub id


@pytest.mark.parametrize("name", ["pytorch_model.bin", "m.pt", "m.pth", "m.pkl", "m.gguf"])
def test_weights_that_can_execute_code_are_refused(tmp_path: Path, name: str) -> None:
    words = rf"has only {name}: .* can execute code on load.*safe_serialization=True"
    with pytest.raises(CheckpointError, match=words):
        resolve(str(model_folder(tmp_path, name)))
    (tmp_path / "model.safetensors").touch()
    assert resolve(str(tmp_path)) == tmp_path


def test_remote_code_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    for read in (load_config, lambda folder: resolve(str(folder))):
        with pytest.raises(CheckpointError, match=r"needs remote code \(auto_map"):
            read(folder)


def test_a_folder_without_weights_or_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors"):
        resolve(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json.*download it again"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["", "nothing", "/no/such", "./no", "a/b/c", "../a", "model.bin"])
def test_other_names_list_what_a_model_may_be(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"local folder .*built-in name .*hub id"):
        resolve(name)


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    code = "from specdec import checkpoints\ntry: checkpoints.resolve('org/name')\n"
    code += "except Exception as e: print(repr(e))"
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    output, errors = done.stdout, done.stderr
    assert output.startswith("CheckpointError("), errors
    assert "cannot reach the hub at http://127.0.0.1:9 for 'org/name'" in output
    assert "give a local folder or the built-in 'smollm2-135m-instruct' instead" in output
    assert output.count("\n") == 1


def test_the_hub_is_asked_for_data_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options)
        if repo_id == "org/gone":
            raise RuntimeError("no such model\nwith details")
        return str(model_folder(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/name-1.5") == tmp_path
    assert asked == {
        "allow_patterns": ["*.safetensors", "*.json", "*.jinja"],
        "ignore_patterns": "*/*",
    }
    with pytest.raises(CheckpointError, match="cannot get 'org/gone' from the hub: no such model;"):
        resolve("org/gone")


def shard(folder: Path, name: str, **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / name)
    return folder / name


def index(folder: Path, weight_map: object) -> None:
    contents = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(contents)


def test_one_file(tmp_path: Path) -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    shard(tmp_path, "model.safetensors", a=tensor, b=tensor + 1)
    weights = open_weights(tmp_path)
    assert weights.names() == {"a", "b"}
    assert "a" in weights
    assert "c" not in weights
    assert torch.equal(weights.get("b"), tensor + 1)
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no tensor c"):
        weights.get("c")


def test_shards(tmp_path: Path) -> None:
    shard(tmp_path, "model-1.safetensors", a=torch.zeros(1))
    shard(tmp_path, "model-2.safetensors", b=torch.ones(1))
    shard(tmp_path, "unrelated.safetensors", c=torch.ones(1))
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    weights = open_weights(tmp_path)
    assert weights.names() == {"a", "b"}
    assert weights.get("b").item() == 1
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is missing"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "..", "x.bin", 5, None]
)
def test_an_index_cannot_reach_out_of_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / "sub").mkdir()
    shard(tmp_path, "x.safetensors", a=torch.zeros(1))
    shard(tmp_path / "sub", "x.safetensors", a=torch.zeros(1))
    index(tmp_path / "sub", {"a": name})
    index(tmp_path, {"a": name})
    for folder in (tmp_path, tmp_path / "sub"):
        with pytest.raises(CheckpointError, match="not a file beside it; refused"):
            open_weights(folder)


def test_an_index_without_a_map(tmp_path: Path) -> None:
    index(tmp_path, ["a"])
    with pytest.raises(CheckpointError, match="has no weight_map"):
        open_weights(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors weights"):
        open_weights(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "empty", "header size", "header text"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    file = shard(tmp_path, "model.safetensors", a=torch.zeros(100))
    contents = file.read_bytes()
    file.write_bytes(
        {
            "truncated": contents[:-8],
            "empty": b"",
            "header size": b"\xff" * 8 + contents[8:],
            "header text": contents[:8] + b"!" + contents[9:],
        }[damage]
    )
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged \(.*\)"):
        open_weights(tmp_path)


def test_verify_without_checksums_reads_the_headers(tmp_path: Path) -> None:
    file = shard(tmp_path, "model.safetensors", a=torch.zeros(100))
    verify(tmp_path)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="is truncated or damaged"):
        verify(tmp_path)


def test_importing_is_light() -> None:
    heavy = "{'torch', 'gguf', 'huggingface_hub', 'rich', 'transformers', 'jinja2'}"
    code = f"import sys, specdec.tokenizer, specdec.text; print({heavy} & set(sys.modules))"
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr
    assert time.monotonic() - start < 5


def test_without_an_index_all_shards_are_read_but_not_what_lies_beside_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: torch.ones(1)}, tmp_path / f"part-{name}.safetensors")
    save_file({"c": torch.ones(1)}, tmp_path / INTEGERS)
    weights = open_weights(tmp_path)
    assert weights.get("a").item() == weights.get("b").item() == 1
    with pytest.raises(CheckpointError, match="no tensor c"):
        weights.get("c")
