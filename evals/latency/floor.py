"""Floor: the bytes that a step cannot avoid to read, and the time that takes at least."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.model import TargetModel
from specdec.native_model import NativeModel
from specdec.target import Target


@dataclass(frozen=True)
class Floor:
    """`weight_bytes` are read once a step, `kv_bytes` per position of the context.

    Of the native forward, weight_bytes include padding to whole panels and the norms; of PyTorch's,
    they are the matrices alone.
    """

    weight_bytes: int
    kv_bytes: float

    @classmethod
    def of(cls, model: Target, kv: str, block_size: int) -> Floor:
        """The floor of a model with a KV cache of this precision."""
        return cls(_weight_bytes(model), model.kv_bytes_per_block(kv, block_size) / block_size)

    def seconds(self, bytes_per_second: float, context: int = 0) -> float:
        """Time of a step at this bandwidth; without a context that of the weights alone."""
        return (self.weight_bytes + context * self.kv_bytes) / bytes_per_second


def _weight_bytes(model: Target) -> int:
    if isinstance(model, NativeModel):
        return model.weights.num_bytes
    assert isinstance(model, TargetModel)
    shape = model.config
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    numbers = shape.num_layers * (attention + mlp) + shape.vocab_size * shape.hidden_size
    return numbers * model.weights.dtype.itemsize
