"""MedusaHeads: heads that guess several tokens ahead from one hidden state; file and arithmetic.

Shared by training and the drafter: `MedusaHeads.load(folder)`, `.guesses(hidden, root)`,
`.given_parent(z, parent)` and `.save(folder, config)`.

A head is (Cai et al. 2024) x <- x + SiLU(W x + b) per layer, then a projection to logits. Ours may
be grounded, as Hydra's are (Ankner et al. 2024), but linearly, so that one product still serves all
heads: before the layers `root` adds a term of the token just chosen, after them `parent` adds one
of the guess before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from specdec import checkpoints
from specdec.errors import CheckpointError

WEIGHTS_FILE = "medusa_lm_head.safetensors"
CONFIG_FILE = "config.json"
MAX_HEADS, MAX_LAYERS = 32, 8


class MedusaHeads:
    """The tensors of all heads, stacked.

    layers: [num_heads, num_layers, hidden, hidden], biases: [num_heads, num_layers, hidden];
    roots: [num_heads, hidden, hidden] or None; parents: [num_heads - 1, hidden, hidden] of the
    heads from 1 on (head 0's parent is the root), or None; projections: [num_heads, rows, hidden],
    None where the target's is used; vocabulary: int32 [rows], the tokens that logits stand for,
    None = all.
    """

    def __init__(
        self,
        layers: Tensor,
        biases: Tensor,
        roots: Tensor | None = None,
        parents: Tensor | None = None,
        projections: Tensor | None = None,
        vocabulary: Tensor | None = None,
    ) -> None:
        self.layers, self.biases = layers, biases
        self.roots, self.parents = roots, parents
        self.projections, self.vocabulary = projections, vocabulary

    @classmethod
    def blank(cls, num_heads: int, num_layers: int, hidden_size: int) -> MedusaHeads:
        """Grounded heads of zeros in fp32: each says what the target's projection says."""
        square = (hidden_size, hidden_size)
        return cls(
            torch.zeros(num_heads, num_layers, *square),
            torch.zeros(num_heads, num_layers, hidden_size),
            torch.zeros(num_heads, *square),
            torch.zeros(num_heads - 1, *square),
        )

    @property
    def num_heads(self) -> int:
        """How many tokens ahead of the root they guess."""
        return len(self.layers)

    def guesses(self, hidden: Tensor, root: Tensor | None) -> Tensor:
        """States whose projection guesses, without the parent's term, [num_heads, n, hidden].

        hidden: [n, hidden], the target's final states, whose logits chose the roots; root: [n,
        hidden], the embeddings of the roots. Products run in `hidden`'s dtype, sums in fp32; head i
        guesses the token i + 2 after the one that the state belongs to.
        """
        return torch.stack([self._guess(i, hidden, root) for i in range(self.num_heads)])

    def given_parent(self, z: Tensor, parent: Tensor) -> Tensor:
        """States of all heads with the term of each one's parent added, [num_heads, n, hidden].

        z: as `guesses` gives; parent: [num_heads - 1, n, hidden], embeddings of the tokens guessed
        before those of heads 1, 2, ...
        """
        if self.parents is None:
            return z
        terms = [F.linear(e, w.to(e.dtype)) for e, w in zip(parent, self.parents, strict=True)]
        return torch.cat((z[:1], z[1:] + torch.stack(terms).float())) if terms else z

    def _guess(self, head: int, hidden: Tensor, root: Tensor | None) -> Tensor:
        dtype = hidden.dtype
        x = hidden.float()
        if self.roots is not None and root is not None:
            x = x + F.linear(root, self.roots[head].to(dtype)).float()
        for weight, bias in zip(self.layers[head], self.biases[head], strict=True):
            x = x + F.silu(F.linear(x.to(dtype), weight.to(dtype)).float() + bias)
        return x

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors under the names that files give them."""
        tensors = {}
        num_layers = self.layers.shape[1]
        for i in range(self.num_heads):
            for j in range(num_layers):
                tensors[f"{i}.{j}.linear.weight"] = self.layers[i, j]
                tensors[f"{i}.{j}.linear.bias"] = self.biases[i, j]
            if self.projections is not None:
                tensors[f"{i}.{num_layers}.weight"] = self.projections[i]
            if self.roots is not None:
                tensors[f"{i}.root.weight"] = self.roots[i]
            if self.parents is not None and i > 0:
                tensors[f"{i}.parent.weight"] = self.parents[i - 1]
        if self.vocabulary is not None:
            tensors["vocabulary"] = self.vocabulary
        return tensors

    def save(self, folder: Path, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Write weights, in `dtype`, and config.json, each in whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.detach().cpu().to(torch.int32 if name == "vocabulary" else dtype).clone()
            for name, tensor in self.named_tensors().items()
        }
        shape = {"medusa_num_heads": self.num_heads, "medusa_num_layers": self.layers.shape[1]}
        save_file(tensors, partial := folder / f"{WEIGHTS_FILE}.partial", {"format": "pt"})
        partial.replace(folder / WEIGHTS_FILE)
        text = json.dumps({**shape, **config}, indent=1)
        (partial := folder / f"{CONFIG_FILE}.partial").write_text(text, encoding="utf-8")
        partial.replace(folder / CONFIG_FILE)

    @classmethod
    def load(cls, folder: Path) -> MedusaHeads:
        """Read heads, ours or published ones, in the dtype of the file.

        Raises CheckpointError naming the tensor that is missing or does not fit the others.
        """
        config = checkpoints.load_config(folder)
        try:
            num_heads = int(config["medusa_num_heads"])
            num_layers = int(config["medusa_num_layers"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / CONFIG_FILE} is not of Medusa heads ({error})") from (
                None
            )
        if not (0 < num_heads <= MAX_HEADS and 0 < num_layers <= MAX_LAYERS):
            raise CheckpointError(
                f"{folder} has {num_heads} heads of {num_layers} layers; supported are 1 to"
                f" {MAX_HEADS} of 1 to {MAX_LAYERS}"
            )
        weights = checkpoints.Weights(folder, [folder / WEIGHTS_FILE])
        size = weights.get("0.0.linear.weight").shape[-1]
        vocabulary = weights.get("vocabulary") if "vocabulary" in weights else None
        if vocabulary is not None and not (
            vocabulary.dim() == 1 and bool((vocabulary.long().diff() > 0).all())
        ):
            raise CheckpointError(f"{folder / WEIGHTS_FILE}: tensor vocabulary is not ascending")

        def get(name: str, *expected: int) -> Tensor:
            tensor = weights.get(name)
            if tuple(tensor.shape) != expected:
                raise CheckpointError(
                    f"{folder / WEIGHTS_FILE}: tensor {name} has shape {list(tensor.shape)},"
                    f" expected {list(expected)} as in the other tensors"
                )
            return tensor

        def optional(names: list[str], *expected: int) -> Tensor | None:
            if not any(name in weights for name in names):
                return None
            return torch.stack([get(name, *expected) for name in names])

        heads = range(num_heads)
        steps = [f"{i}.{j}.linear" for i in heads for j in range(num_layers)]
        projections = [f"{i}.{num_layers}.weight" for i in heads]
        num_rows = 0
        if projections[0] in weights:
            num_rows = len(weights.get(projections[0]) if vocabulary is None else vocabulary)
        layers = torch.stack([get(f"{name}.weight", size, size) for name in steps])
        biases = torch.stack([get(f"{name}.bias", size) for name in steps])
        return cls(
            layers.unflatten(0, (num_heads, num_layers)),
            biases.unflatten(0, (num_heads, num_layers)),
            optional([f"{i}.root.weight" for i in heads], size, size),
            optional([f"{i}.parent.weight" for i in heads[1:]], size, size),
            optional(projections, num_rows, size),
            vocabulary,
        )
