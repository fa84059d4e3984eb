"""ModelWeights: a checkpoint's tensors, fused and packed once at load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels.attention_group import ROW_TILE
from specdec.model_config import ModelConfig


class TensorSource(Protocol):
    """Where tensors come from by name; `checkpoints.Weights` and the tests' toy models."""

    def get(self, name: str) -> Tensor:
        """The tensor, or CheckpointError."""


class PackedLinear:
    """y = x W^T + b, with the weight packed by oneDNN on the CPU.

    Products see at most `row_tile` rows at a time, so that a row's result does not depend on how
    many rows stand beside it (docs/adr/0003); None = all at once.

    weight: [out_features, in_features]; x: [num_rows, in_features], of any dtype and device.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, row_tile: int | None = ROW_TILE
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._device, self._dtype = weight.device, weight.dtype
        self._bias = bias
        self._row_tile = row_tile
        self._is_packed = (
            weight.device.type == "cpu"
            and weight.dtype != torch.float16  # packs only on the few processors that compute it
            and torch.backends.mkldnn.is_available()
        )
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROW_TILE)
            if self._is_packed
            else weight
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""
        return self.out_features * self.in_features * self._weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._device, self._dtype)
        if self._row_tile is None or x.shape[0] <= self._row_tile:
            return self._product(x)
        return torch.cat([self._product(rows) for rows in x.split(self._row_tile)])

    def _product(self, x: Tensor) -> Tensor:
        if not self._is_packed:
            return torch.nn.functional.linear(x, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return out


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; norms are fp32 [hidden] or [head_dim]."""

    input_norm: Tensor
    qkv: PackedLinear  # rows: query heads, key heads, value heads
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True)
class ModelWeights:
    """The whole decoder. `embedding` is [vocab, hidden] in the model's dtype."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: PackedLinear
    dtype: torch.dtype
    row_tile: int | None

    @property
    def num_bytes(self) -> int:
        """Memory of the matrices."""
        layers = [p for x in self.layers for p in (x.qkv, x.output, x.gate_up, x.down)]
        return self.embedding.nbytes + sum(product.num_bytes for product in (*layers, self.head))

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        row_tile: int | None = ROW_TILE,
        lender: ModelWeights | None = None,
    ) -> ModelWeights:
        """Fuse q, k, v and gate, up; pack every product's weight for `row_tile` rows at a time.

        The embedding is the `lender`'s where there is one.

        Raises CheckpointError if a tensor is missing.
        """

        def get(*names: str, suffix: str = "weight", as_dtype: torch.dtype = dtype) -> Tensor:
            parts = [source.get(f"{name}.{suffix}") for name in names]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
            return tensor.to(device, as_dtype)

        def linear(*names: str, has_bias: bool) -> PackedLinear:
            bias = get(*names, suffix="bias") if has_bias else None
            return PackedLinear(get(*names), bias, row_tile=row_tile)

        def norm(name: str) -> Tensor:
            return get(name, as_dtype=torch.float32)

        def layer(index: int) -> LayerWeights:
            root = f"model.layers.{index}"
            attn, mlp = f"{root}.self_attn", f"{root}.mlp"
            return LayerWeights(
                input_norm=norm(f"{root}.input_layernorm"),
                qkv=linear(*(f"{attn}.{x}_proj" for x in "qkv"), has_bias=config.has_qkv_bias),
                q_norm=norm(f"{attn}.q_norm") if config.has_qk_norm else None,
                k_norm=norm(f"{attn}.k_norm") if config.has_qk_norm else None,
                output=linear(f"{attn}.o_proj", has_bias=config.has_output_bias),
                mlp_norm=norm(f"{root}.post_attention_layernorm"),
                gate_up=linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", has_bias=config.has_mlp_bias),
                down=linear(f"{mlp}.down_proj", has_bias=config.has_mlp_bias),
            )

        embedding = get("model.embed_tokens") if lender is None else lender.embedding
        return cls(
            embedding=embedding,
            layers=tuple(layer(index) for index in range(config.num_layers)),
            final_norm=norm("model.norm"),
            head=PackedLinear(embedding if config.is_tied else get("lm_head"), row_tile=row_tile),
            dtype=dtype,
            row_tile=row_tile,
        )
