"""CostCache: measured step costs on disk, one file per model, device and settings.

Nothing here fails: a file that cannot be read or is not what it should be counts as none, and one
that cannot be written is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from specdec.builtin_model import cache_folder
from specdec.config import EngineConfig
from specdec.cost_table import CostTable
from specdec.loading import LoadedModel
from specdec.native_model import NativeModel

_FORMAT = 1  # of the file and of what the numbers mean

_log = logging.getLogger(__name__)


def identity(loaded: LoadedModel, config: EngineConfig) -> dict[str, Any]:
    """All that step costs depend on, ready for JSON."""
    model = loaded.model
    threads = model.num_threads if isinstance(model, NativeModel) else torch.get_num_threads()
    return {
        "format": _FORMAT,
        "model": loaded.name,
        "shape": repr(model.config),
        "weight_bytes": model.weight_bytes,
        "max_model_len": loaded.max_model_len,
        "target": type(model).__name__,
        "weights": config.weights,
        "kv": config.kv,
        "backend": config.backend,
        "deterministic": config.deterministic,
        "block_size": config.block_size,
        "token_budget": config.token_budget,
        "max_running": config.max_running,
        "device": _device_name(model.device),
        "threads": threads,
        "torch": str(torch.__version__),
        "specdec": _version(),
    }


def load(identity: dict[str, Any]) -> CostTable | None:
    """The table kept for exactly this identity, None if there is none that is whole."""
    try:
        kept = json.loads(_file(identity).read_text(encoding="utf-8"))
        if kept["identity"] == identity:
            return CostTable.from_json(kept["table"])
        _log.debug("step cost: a cached table is of something else")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        _log.debug("step cost: no cached table: %s", error)
    return None


def save(identity: dict[str, Any], table: CostTable) -> None:
    """Keep a table for the next start; a file is replaced whole or not at all."""
    try:
        file = _file(identity)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"identity": identity, "table": table.as_json()}, allow_nan=False)
        handle, temporary = tempfile.mkstemp(prefix=f".{file.stem}-", dir=file.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(temporary, file)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        _log.warning("step cost: will be measured again at the next start: %s", error)


def _file(identity: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "step-cost" / f"{digest[:24]}.json"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {capability}"
    return f"{platform.machine()}, {capability}"


def _version() -> str:
    try:
        return version("specdec-server")
    except PackageNotFoundError:
        return "not installed"
