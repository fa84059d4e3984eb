"""PeakMemory: the most memory that this process has had at a time, as contenders join it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec.engine import Engine
from specdec.model import TargetModel
from specdec.native_model import NativeModel

STATUS = Path("/proc/self/status")


class PeakMemory:
    """Notes the high-water mark stage by stage; it never falls, so a stage has what was before it.

    On a GPU, what PyTorch has allocated there is noted as well.

    Example: `memory = PeakMemory(); load(); memory.note("the model"); memory.stages`.
    """

    def __init__(self) -> None:
        self.stages: list[dict[str, Any]] = []

    def note(self, name: str) -> None:
        """A stage has come to its end."""
        stage: dict[str, Any] = {"after": name, "resident_bytes": resident_peak()}
        if torch.cuda.is_initialized():
            stage["gpu_bytes"] = torch.cuda.max_memory_allocated()
        self.stages.append(stage)

    def peak(self, name: str) -> int:
        """The high-water mark after a stage, in bytes: of the GPU if there is one."""
        stage = next(stage for stage in self.stages if stage["after"] == name)
        return int(stage.get("gpu_bytes", stage["resident_bytes"]))


def resident_peak() -> int:
    """Bytes of this process's memory that were resident at the same time, at most so far."""
    # getrusage would count what the parent had when it started this process.
    for line in STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def known_bytes(engine: Engine) -> dict[str, int]:
    """What is known of an engine's memory: its weights, and the KV cache that it has reserved.

    Reserved memory is resident only where it has been written to.
    """
    config, model = engine.config, engine.loaded.model
    assert isinstance(model, NativeModel | TargetModel)
    block_bytes = model.kv_bytes_per_block(config.kv, config.block_size)
    return {
        "weight_bytes": model.weights.num_bytes,
        "kv_cache_bytes": engine.pool.num_blocks * block_bytes,
    }
