"""NativeWeights: a GGUF file's own integers, and the bytes that a forward reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from torch import Tensor

from specdec import checkpoints
from specdec.gguf_conversion import convert
from specdec.model_config import ModelConfig
from specdec.native_weights import NativeWeights
from specdec.weights import TensorSource
from tests.native_oracle import ToyTensors
from tests.native_session import SMALL, native_library
from tests.tiny_gguf import Arrays, random_weights, write_gguf


class Quiet:
    """Stages that nobody watches."""

    def start(self, text: str, total: int | None = None) -> None: ...

    def advance(self) -> None: ...


class Exact:
    """What the file's integers stand for, in fp32: its conversion rounds them to bf16."""

    def __init__(self, weights: Arrays) -> None:
        self._weights = weights

    def get(self, name: str) -> Tensor:
        values = self._weights[name]
        if values.ndim == 2:
            kind = GGMLQuantizationType.Q4_1
            values = dequantize(quantize(values, kind), kind)
        return torch.tensor(values)


def packed(folder: Path, source: TensorSource, *, with_integers: bool) -> list[Tensor]:
    config = ModelConfig.from_checkpoint(checkpoints.load_config(folder))
    integers = checkpoints.open_integers(folder) if with_integers else None
    weights = NativeWeights(native_library(), config, source, "int4", integers)
    return list(weights._kept)


def test_integers_of_a_gguf_are_taken_as_they_are(tmp_path: Path) -> None:
    """Equal to packing the exact values, whose extremes are the integers 0 and 15 again."""
    values = random_weights()
    write_gguf(tmp_path / "tiny.gguf", values)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder, Quiet())
    rounded = checkpoints.open_weights(folder)
    taken = packed(folder, rounded, with_integers=True)
    exact = packed(folder, Exact(values), with_integers=True)
    wanted = packed(folder, Exact(values), with_integers=False)
    again = packed(folder, rounded, with_integers=False)
    # The embedding comes first: it is int8 here and Q4_1 there, so it is rounded anew.
    assert all(torch.equal(a, b) for a, b in zip(exact[1:], wanted[1:], strict=True))
    matrices = [i for i, t in enumerate(wanted) if t.dtype == torch.uint8][1:]
    assert matrices and all(torch.equal(taken[i], wanted[i]) for i in matrices)
    assert not any(torch.equal(again[i], wanted[i]) for i in matrices)


def test_a_checkpoint_without_integers_has_none(tmp_path: Path) -> None:
    assert checkpoints.open_integers(tmp_path) is None


@pytest.mark.parametrize("is_tied", [True, False])
def test_bytes_read_leave_out_an_embedding_that_is_not_the_head(is_tied: bool) -> None:
    fields = {**SMALL, "tie_word_embeddings": is_tied}
    config = ModelConfig.from_checkpoint(fields)
    weights = NativeWeights(native_library(), config, ToyTensors(fields), "fp32")
    kept = sum(t.numel() * t.element_size() for t in weights._kept)
    embedding = weights._kept[0].numel()
    assert weights.num_bytes == (kept if is_tied else kept - embedding)
