"""DraftLayers: the decoder layers of a small draft model, over whole sequences, for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.model_config import ModelConfig

PRODUCTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


class TensorSource(Protocol):
    """Anything that gives a tensor by its checkpoint name."""

    def get(self, name: str) -> Tensor:
        """The tensor. Raises CheckpointError if it is missing."""


def copied_layers(
    source: TensorSource, layers: Sequence[int], *, inner: int, hidden: int, seed: int
) -> dict[str, Tensor]:
    """fp32 tensors of a draft model that begins with these layers of its target, and its last norm.

    A feed-forward network of another width than the target's cannot be copied: it begins at random
    with an output of zero.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {"model.norm.weight": source.get("model.norm.weight").float().clone()}
    for own, other in enumerate(layers):
        for part in (*PRODUCTS, *NORMS):
            weight = source.get(f"model.layers.{other}.{part}.weight").float().clone()
            if part in MLP and inner not in weight.shape:
                shape = (hidden, inner) if part == "mlp.down_proj" else (inner, hidden)
                weight = torch.randn(shape, generator=generator) * hidden**-0.5
                weight *= part != "mlp.down_proj"
            tensors[f"model.layers.{own}.{part}.weight"] = weight
    return tensors


class DraftLayers:
    """Maps embeddings of sequences to the states that the target's projection makes logits of.

    The same arithmetic as the engine's: products in `dtype`, everything between them in fp32.
    """

    def __init__(
        self, config: ModelConfig, parameters: Mapping[str, Tensor], dtype: torch.dtype
    ) -> None:
        """`parameters` by their names in a checkpoint; `config.num_layers` is the draft model's."""
        self.config, self.parameters, self.dtype = config, parameters, dtype
        device = parameters["model.norm.weight"].device
        self._cos, self._sin = (t.to(device) for t in config.rope.tables(config.max_position))

    def states(self, embedded: Tensor, lengths: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Final states, fp32, of each sequence's positions from its start on, back to back.

        embedded: [num_tokens, hidden], sequences of these lengths back to back. The last layer
        computes no queries before a start.
        """
        device = embedded.device
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        wanted = torch.cat([torch.arange(n) >= s for n, s in zip(lengths, starts, strict=True)])
        rows = wanted.nonzero()[:, 0].to(device)
        x = embedded.float()
        for layer in range(self.config.num_layers):
            is_last = layer == self.config.num_layers - 1
            x = self._layer(
                layer,
                x,
                positions,
                lengths,
                rows if is_last else None,
                starts if is_last else [0] * len(lengths),
            )
        return self._norm(x, "model.norm")

    def _layer(
        self,
        layer: int,
        x: Tensor,
        positions: Tensor,
        lengths: Sequence[int],
        rows: Tensor | None,
        starts: Sequence[int],
    ) -> Tensor:
        root = f"model.layers.{layer}"
        normed = self._norm(x, f"{root}.input_layernorm")
        k = self._heads(f"{root}.self_attn.k_proj", normed, positions)
        v = self._heads(f"{root}.self_attn.v_proj", normed, None)
        if rows is not None:
            x, normed, positions = x[rows], normed[rows], positions[rows]
        q = self._heads(f"{root}.self_attn.q_proj", normed, positions)
        x = x + self._product(f"{root}.self_attn.o_proj", self._attend(q, k, v, lengths, starts))
        normed = self._norm(x, f"{root}.post_attention_layernorm")
        gate = self._product(f"{root}.mlp.gate_proj", normed)
        up = self._product(f"{root}.mlp.up_proj", normed)
        return x + self._product(f"{root}.mlp.down_proj", F.silu(gate) * up)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], starts: Sequence[int]
    ) -> Tensor:
        """Causal attention, sequence by sequence: their lengths differ, padding would be work."""
        group = self.config.num_heads // self.config.num_kv_heads
        k, v = (t.repeat_interleave(group, dim=0) for t in (k, v))
        counts = [length - start for length, start in zip(lengths, starts, strict=True)]
        mixed = []
        for own, keys, values, start in zip(
            q.split(counts, 1),
            k.split(list(lengths), 1),
            v.split(list(lengths), 1),
            starts,
            strict=True,
        ):
            shape = (own.shape[1], keys.shape[1])
            mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril(start)
            out = F.scaled_dot_product_attention(own[None], keys[None], values[None], mask)
            mixed.append(out[0])
        return torch.cat(mixed, 1).transpose(0, 1).flatten(1)

    def _heads(self, name: str, x: Tensor, positions: Tensor | None) -> Tensor:
        """[num_heads, n, head_dim] in `dtype`, rotated if positions are given."""
        heads: Tensor = self._product(name, x).unflatten(1, (-1, self.config.head_dim))
        if positions is not None:
            cos, sin = self._cos[positions, None], self._sin[positions, None]
            half = self.config.head_dim // 2
            swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
            heads = heads * cos + swapped * sin
        return heads.to(self.dtype).transpose(0, 1)

    def _product(self, name: str, x: Tensor) -> Tensor:
        weight = self.parameters[f"{name}.weight"].to(self.dtype)
        return F.linear(x.to(self.dtype), weight).float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.parameters[f"{name}.weight"]
        normed: Tensor = F.rms_norm(x, weight.shape, weight, self.config.norm_eps)
        return normed
