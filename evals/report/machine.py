"""Machine: what measured figures are from, beside every one of them."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from specdec.config import EngineConfig
from specdec.native_model import NativeModel
from specdec.target import Target

_PACKAGES = ("specdec-server", "torch")
_KEY_OPTIONS, _SECRET = ("--api-key", "--against-key"), "..."


def origin(*packages: str) -> dict[str, Any]:
    """Date, command line, machine and versions: the first entries of every report.

    `packages` are those of others whose versions matter too; what is not installed is left out.
    Example: `{**origin("aiohttp"), "rows": rows}`.
    """
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["specdec", *_without_key(sys.argv[1:])]),
        "machine": machine(*packages),
    }


def machine(*packages: str) -> dict[str, Any]:
    """What the numbers are from."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "versions": dict(_versions((*_PACKAGES, *packages))),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """The machine and the versions in one line, for terminals and plots."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{machine['processor']}, {machine['cores']} cores, {machine['capability']}; {versions}"


def target(config: EngineConfig, model: Target) -> dict[str, Any]:
    """What was served."""
    return {
        "model": config.model,
        "weights": model.precision,
        "kv": config.kv,
        "backend": "native" if isinstance(model, NativeModel) else "torch",
    }


def _without_key(arguments: list[str]) -> list[str]:
    """Reports are shown around, and a server's key must not be."""
    shown = []
    is_key = False
    for argument in arguments:
        name = argument.partition("=")[0]
        if is_key:
            shown.append(_SECRET)
        elif name in _KEY_OPTIONS and "=" in argument:
            shown.append(f"{name}={_SECRET}")
        else:
            shown.append(argument)
        is_key = argument in _KEY_OPTIONS
    return shown


def _versions(packages: tuple[str, ...]) -> list[tuple[str, str]]:
    found = []
    for name in packages:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
