"""Checkpoints: find a model's folder, refuse what is not data, read config and weights.

A checkpoint is a folder with config.json, safetensors weights and tokenizer.json. Only data is
ever read from it: pickled weights and remote code are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import builtin_model
from specdec.config import DEFAULT_MODEL
from specdec.errors import CheckpointError
from specdec.gguf_conversion import INTEGERS

if TYPE_CHECKING:
    import torch

HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".gguf")


def resolve(name: str) -> Path:
    """The folder of the model `name`: the built-in, a local folder, or a hub id `org/name`.

    Pulls the built-in and hub models that are not in the cache. Example: `resolve("./my-model")`.
    Raises CheckpointError when there is no such model or it is not safe to load.
    """
    if name == DEFAULT_MODEL:
        return builtin_model.pull()
    path = Path(name).expanduser()
    if name and path.is_dir():
        folder = path
    elif re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not path.exists():
        folder = _from_hub(name)
    else:
        raise CheckpointError(
            f"no model {name!r}: give a local folder with config.json and *.safetensors, the"
            f" built-in name {DEFAULT_MODEL!r}, or a hub id such as 'org/name'"
        )
    if not any(folder.glob("*.safetensors")):
        unsafe = sorted(file.name for file in folder.iterdir() if file.suffix in UNSAFE_SUFFIXES)
        if unsafe:
            raise CheckpointError(
                f"{folder} has only {unsafe[0]}: such files can execute code on load, so only"
                " safetensors are loaded; convert with save_pretrained(safe_serialization=True)"
            )
        raise CheckpointError(f"{folder} has no *.safetensors weights; add them to the folder")
    load_config(folder)
    return folder


def load_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json. Raises CheckpointError if missing, invalid or with auto_map."""
    config = read_json(folder / "config.json")
    if "auto_map" in config:
        raise CheckpointError(
            f"{folder} needs remote code (auto_map in config.json), which is never run;"
            " use a checkpoint of a built-in architecture"
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises CheckpointError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; is it a checkpoint?") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; download it again")
    return value


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

    instead = f"give a local folder or the built-in {DEFAULT_MODEL!r} instead"
    try:
        # "*/*" leaves out subfolders, where repositories keep other formats of the same weights.
        return Path(snapshot_download(repo_id, allow_patterns=HUB_FILES, ignore_patterns="*/*"))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"cannot reach the hub at {constants.ENDPOINT} for {repo_id!r}, and it is not in the"
            f" local cache; {instead}"
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repo_id!r} asks for access on the hub: log in with `hf auth login`, or {instead}"
        ) from error
    except Exception as error:  # the hub's client lets its HTTP library's errors through
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"cannot get {repo_id!r} from the hub: {reason}; {instead}"
        ) from error


def verify(folder: Path) -> None:
    """Check a checkpoint's files: their sha256 where it has checksums, else the weights' headers.

    A built-in model has checksums. Raises CheckpointError.
    """
    if not (folder / builtin_model.CHECKSUMS).is_file():
        open_weights(folder)
        return
    for name, expected in read_json(folder / builtin_model.CHECKSUMS).items():
        file = folder / name
        if not file.is_file() or builtin_model.sha256(file) != expected:
            raise CheckpointError(
                f"{file} is missing or damaged; remove {folder} and run `specdec pull` again"
            )


class Weights:
    """Lazy reader of a checkpoint's tensors: one safetensors file, or shards named by an index.

    Opening reads headers only; `get` maps a tensor from disk. Raises CheckpointError for a file
    that is missing, truncated or not safetensors.
    """

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        self._folder = folder
        self._shards: dict[str, Any] = {}  # tensor name to the open file that holds it
        for file in files or _weight_files(folder):
            shard = _open_shard(file)
            self._shards.update(dict.fromkeys(shard.keys(), shard))
        if not self._shards:
            raise CheckpointError(f"{folder} has no *.safetensors weights; add them to the folder")

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._shards)

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def get(self, name: str) -> torch.Tensor:
        """The tensor `name`, mapped from disk. Raises CheckpointError if there is none."""
        if name not in self._shards:
            raise CheckpointError(
                f"{self._folder} has no tensor {name}; is the checkpoint complete?"
            )
        tensor: torch.Tensor = self._shards[name].get_tensor(name)
        return tensor


def open_integers(folder: Path) -> Weights | None:
    """The integer weights that a checkpoint was made from, if they were kept beside it."""
    file = folder / INTEGERS
    return Weights(folder, [file]) if file.is_file() else None


def open_weights(folder: Path) -> Weights:
    """Open a checkpoint's weights. Example: `open_weights(folder).get("model.norm.weight")`."""
    return Weights(folder)


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(index)
    if single.exists():
        return [single]
    return [file for file in sorted(folder.glob("*.safetensors")) if file.name != INTEGERS]


def _indexed_files(index: Path) -> list[Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise CheckpointError(f"{index} has no weight_map; download it again")
    for name in names.values():
        # An index is data from elsewhere: it must not reach out of its folder.
        if not re.fullmatch(r"\w[\w.-]*\.safetensors", str(name)):
            raise CheckpointError(f"{index} names {name!r}, which is not a file beside it; refused")
    return [index.with_name(name) for name in sorted(set(names.values()))]


def _open_shard(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; download the checkpoint again") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or damaged ({error}); download the checkpoint again"
        ) from error
