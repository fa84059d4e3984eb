"""MachineCache: what was measured on this machine, on disk, one file per kind and identity.

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
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from specdec.builtin_model import cache_folder

_log = logging.getLogger(__name__)


def load(kind: str, identity: Mapping[str, Any]) -> Any:
    """What was kept for exactly this identity, None if there is nothing that is whole.

    Example: `load("step-cost", identity)`.
    """
    try:
        kept = json.loads(_file(kind, identity).read_text(encoding="utf-8"))
        if kept["identity"] == identity:
            return kept["value"]
        _log.debug("%s: what is cached is of something else", kind)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        _log.debug("%s: nothing cached: %s", kind, error)
    return None


def save(kind: str, identity: Mapping[str, Any], value: Any) -> None:
    """Keep a JSON value for the next start; a file is replaced whole or not at all."""
    try:
        file = _file(kind, identity)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"identity": identity, "value": value}, allow_nan=False)
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
        _log.warning("%s: will be measured again at the next start: %s", kind, error)


def machine_identity(device: torch.device) -> dict[str, Any]:
    """What every measurement depends on: the device and the versions."""
    return {
        "device": _device_name(device),
        "torch": str(torch.__version__),
        "specdec": _version(),
    }


def _file(kind: str, identity: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cache_folder() / kind / f"{digest[:24]}.json"


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
