"""PeerSetup: what peers need of us, and how what they miss is told."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from specdec.errors import UsageError


@dataclass(frozen=True)
class PeerSetup:
    """Our model, the longest context, models in formats of peers, and how answers are sampled."""

    model: str
    max_len: int
    openvino_model: Path | None = None
    gguf: Path | None = None
    temperature: float = 0.0


def need_module(module: str, peer: str, package: str) -> None:
    """Raise UsageError unless a peer's module is installed; nothing is imported."""
    is_there = sys.modules[module] is not None if module in sys.modules else find_spec(module)
    if not is_there:
        raise UsageError(f"--vs {peer} needs a package: pip install {package}")


def num_cores() -> int:
    """Those that this process may use: as many threads as the engine's forward has."""
    return len(os.sched_getaffinity(0))
