"""CostCache: measured step costs of one model, device and settings, kept for the next start."""

from __future__ import annotations

import logging
from typing import Any

import torch

from specdec import machine_cache
from specdec.config import EngineConfig
from specdec.cost_table import CostTable
from specdec.loading import LoadedModel
from specdec.native_model import NativeModel

_KIND = "step-cost"
_FORMAT = 2  # of the file and of what the numbers mean

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
        "weights": model.precision,
        "kv": config.kv,
        "backend": config.backend,
        "deterministic": config.deterministic,
        "block_size": config.block_size,
        "token_budget": config.token_budget,
        "max_running": config.max_running,
        "threads": threads,
        **machine_cache.machine_identity(model.device),
    }


def load(identity: dict[str, Any]) -> CostTable | None:
    """The table kept for exactly this identity, None if there is none that is whole."""
    kept = machine_cache.load(_KIND, identity)
    if kept is not None:
        try:
            return CostTable.from_json(kept)
        except ValueError as error:
            _log.debug("%s: no cached table: %s", _KIND, error)
    return None


def save(identity: dict[str, Any], table: CostTable) -> None:
    """Keep a table for the next start."""
    machine_cache.save(_KIND, identity, table.as_json())
