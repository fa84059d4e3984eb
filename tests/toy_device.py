"""The device path on a toy model: real kernels on a GPU, interpreted ones elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch

from specdec.kernels import dispatch
from specdec.loading import LoadedModel
from specdec.model import TargetModel
from specdec.model_config import ModelConfig
from specdec.weights import ModelWeights
from tests.kernels.device import DEVICE
from tests.toy import CONFIG, EOS, RandomTensors, toy_tokenizer

ROW_TILE = 8  # pinned rows; a GPU pins more, which an interpreter would pay for


@contextmanager
def device_path() -> Iterator[None]:
    """Everything inside goes through Triton, on the CPU too."""
    with patch.object(dispatch, "uses_triton", lambda device: True):
        yield


@cache
def toy_device_model(*, is_deterministic: bool = True) -> LoadedModel:
    """The toy Llama on DEVICE, its products seeing ROW_TILE rows or any number."""
    config = ModelConfig.from_checkpoint(CONFIG)
    weights = ModelWeights.load(
        config,
        RandomTensors(CONFIG, 0),
        torch.float32,
        DEVICE,
        ROW_TILE if is_deterministic else None,
    )
    target = TargetModel(config, weights, config.max_position)
    return LoadedModel(target, toy_tokenizer(), (EOS,), "toy", config.max_position)
