"""What this machine and this installation offer, for `specdec info`."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from specdec.builtin_model import cache_folder
from specdec.config import DEFAULT_MODEL
from specdec.drafting import available_drafters
from specdec.kernels import native_library
from specdec.precision import resolve_precision

_PACKAGES = ("specdec-server", "torch", "triton", "safetensors", "tokenizers", "starlette")


def collect() -> dict[str, Any]:
    """Devices, dtypes, processor features, drafters, paths and versions, ready for JSON."""
    cpu = torch.device("cpu")
    return {
        "devices": [
            "cpu",
            *(f"cuda:{i} {_cuda_name(i)}" for i in range(torch.cuda.device_count())),
        ],
        "auto_weights": "a checkpoint's own integers where they are faster, else "
        + resolve_precision("auto", cpu),
        "cpu": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
            "amx": torch.cpu._is_amx_tile_supported(),
            "packed_weights": torch.backends.mkldnn.is_available(),
        },
        "native_forward": native_library.state(cache_folder() / "native"),
        "deterministic": "always on the CPU",
        "drafters": list(available_drafters()),
        "default_model": DEFAULT_MODEL,
        "cache": str(cache_folder()),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def render(facts: dict[str, Any]) -> str:
    """The facts as aligned lines."""
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        lines.append(f"{name.replace('_', ' '):14} {value}")
    return "\n".join(lines)


def _cuda_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
