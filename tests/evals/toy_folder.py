"""Toy folder: a small checkpoint on disk with a byte tokenizer, for measurements to run on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specdec.config import Backend, EngineConfig
from specdec.errors import UsageError
from specdec.loading import LoadedModel, load_model
from tests.server.conftest import make_folder
from tests.server.real_engine import add_weights
from tests.toy import RandomTensors


def write_toy(folder: Path) -> Path:
    """Two layers with random weights, contexts of up to 512 tokens, one token to a byte.

    Of a shape that transformers accepts too: heads times head_dim are the hidden size.
    """
    add_weights(make_folder(folder))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "llama", "hidden_size": 96}
    (folder / "config.json").write_text(json.dumps(config))
    source = RandomTensors(config, seed=1)
    file = folder / "model.safetensors"
    save_file({name: source.get(name).contiguous() for name in load_file(file)}, file)
    return folder


def toy_config(folder: Path, backend: Backend) -> EngineConfig:
    """One thread, in fp32, with a small KV cache."""
    return EngineConfig(
        model=str(folder), weights="fp32", backend=backend, threads=1, kv_memory_mib=8
    )


def load_or_skip(config: EngineConfig) -> LoadedModel:
    """The model, or a skipped test that says why its backend is not to be had."""
    try:
        return load_model(config)
    except UsageError as reason:
        pytest.skip(str(reason))
