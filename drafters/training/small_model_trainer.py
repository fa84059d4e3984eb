"""SmallModelTrainer: a draft model of a few layers that borrows its target's embedding and head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.drafters.training.acceptance import KINDS, AcceptanceCounts, kind_of, summary
from specdec.drafters.training.corpus import TrainingSequence
from specdec.drafters.training.draft_layers import DraftLayers, copied_layers
from specdec.drafters.training.projection import DraftProjection
from specdec.drafters.training.target_tensors import TargetTensors
from specdec.errors import UnsupportedModel, UsageError

WEIGHTS_FILE = "model.safetensors"
CHAIN = 5  # tokens of the chain whose accepted length is reported


@dataclass(frozen=True)
class SmallModelOptions:
    """Shape of the draft model and of its loss. `layers` are the target's layers to begin with."""

    layers: tuple[int, ...] = (-1,)  # -1 is the last one
    intermediate_size: int | None = None  # None: the target's
    soft_share: float = 0.5


class SmallModelTrainer:
    """A draft model in training. Products run in the dtype of `target`, everything else in fp32."""

    unit: Literal["outputs", "tokens"] = "tokens"

    def __init__(
        self,
        target: TargetTensors,
        projection: DraftProjection,
        options: SmallModelOptions,
        seed: int,
    ) -> None:
        """Raises UsageError for a layer that is not there, UnsupportedModel for biases or norms."""
        shape = target.config
        if shape.has_qkv_bias or shape.has_output_bias or shape.has_mlp_bias or shape.has_qk_norm:
            raise UnsupportedModel(
                "a small model can be trained only for targets without biases and query norms, such"
                " as Llama's; train Medusa heads for this one"
            )
        for layer in options.layers:
            if not -shape.num_layers <= layer < shape.num_layers:
                raise UsageError(f"the target has no layer {layer}; it has {shape.num_layers}")
        if not options.layers:
            raise UsageError("name at least one of the target's layers to begin with")
        self.target, self.projection, self.options = target, projection, options
        inner = options.intermediate_size or shape.intermediate_size
        layers = [layer % shape.num_layers for layer in options.layers]
        self.config = replace(
            shape, num_layers=len(layers), intermediate_size=inner, windows=(None,) * len(layers)
        )
        tensors = copied_layers(
            target.weights, layers, inner=inner, hidden=shape.hidden_size, seed=seed
        )
        device, dtype = target.embedding.device, target.embedding.dtype
        self.parameters: dict[str, Tensor] = {
            name: tensor.to(device).requires_grad_() for name, tensor in tensors.items()
        }
        self.layers = DraftLayers(self.config, self.parameters, dtype)

    def loss(self, sequences: Sequence[TrainingSequence], seed: int) -> tuple[Tensor, int]:
        """Mean loss over a batch's output tokens, and their number. Nothing in it is random."""
        del seed
        states = self._states(sequences)
        labels = self._labels(sequences)
        total = self.projection.loss(
            states,
            torch.cat([self.projection.soft_targets(s) for s in sequences]),
            labels,
            soft_share=self.options.soft_share,
            mask=torch.ones(len(states), device=states.device),
        )
        return total / len(states), len(states)

    @torch.no_grad()
    def evaluate(self, sequences: Sequence[TrainingSequence]) -> dict[str, Any]:
        """Acceptance given the true path, as `acceptance.summary` has it, with one head."""
        counts = {kind: AcceptanceCounts.of(1) for kind in KINDS}
        for sequence in sequences:
            ranks = self.projection.ranks(self._states([sequence]), self._labels([sequence])).cpu()
            own = counts[kind_of(sequence.temperature)]
            own.add(ranks[None], torch.ones(1, len(ranks), dtype=torch.bool))
            # The same weights guess every token of a chain, so its length is that of a run.
            if len(ranks) >= CHAIN:
                own.add_chains((ranks == 0).unfold(0, CHAIN, 1).t())
        return summary(counts)

    def save(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Write a checkpoint of the draft model as it is now, each file in whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        dtype = self.target.embedding.dtype
        tensors = {n: t.detach().to("cpu", dtype).clone() for n, t in self.parameters.items()}
        if self.projection.vocabulary is not None:
            tensors["vocabulary"] = self.projection.vocabulary.int().clone()
        save_file(tensors, partial := folder / f"{WEIGHTS_FILE}.partial", {"format": "pt"})
        partial.replace(folder / WEIGHTS_FILE)
        text = json.dumps({**self._raw_config(), **config}, indent=1)
        (partial := folder / "config.json.partial").write_text(text, encoding="utf-8")
        partial.replace(folder / "config.json")

    def _raw_config(self) -> dict[str, Any]:
        raw = dict(self.target.raw_config)
        raw.pop("layer_types", None)
        return {
            **raw,
            "num_hidden_layers": self.config.num_layers,
            "intermediate_size": self.config.intermediate_size,
            "shares_embeddings_with": self.target.name,
        }

    def _states(self, sequences: Sequence[TrainingSequence]) -> Tensor:
        """States that choose the outputs: of the tokens before them, [num_outputs, hidden]."""
        ids = torch.cat([s.token_ids[:-1] for s in sequences]).long()
        lengths = [len(s.token_ids) - 1 for s in sequences]
        starts = [s.output_start - 1 for s in sequences]
        embedding = self.target.embedding
        return self.layers.states(embedding[ids.to(embedding.device)], lengths, starts)

    def _labels(self, sequences: Sequence[TrainingSequence]) -> Tensor:
        output = torch.cat([s.output for s in sequences]).long()
        return self.projection.index(output.to(self.target.embedding.device))
