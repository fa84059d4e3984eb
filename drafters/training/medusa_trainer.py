"""MedusaTrainer: what a batch costs Medusa heads, and how good they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specdec.drafters.medusa_heads import MedusaHeads
from specdec.drafters.training.acceptance import KINDS, AcceptanceCounts, kind_of, summary
from specdec.drafters.training.corpus import TrainingSequence
from specdec.drafters.training.projection import DraftProjection
from specdec.drafters.training.target_tensors import TargetTensors

HEAD_DECAY = 0.8  # of a head's weight in the loss, per head: later ones are seldom reached
PARENT_DROPOUT = 0.25  # at run time candidates are first taken without the parent's term


@dataclass(frozen=True)
class MedusaOptions:
    """Shape of the heads and of their loss."""

    num_heads: int = 4
    num_layers: int = 1
    soft_share: float = 0.5


class MedusaTrainer:
    """Heads in training. Products run in the dtype of `target`, everything else in fp32."""

    unit: Literal["outputs", "tokens"] = "outputs"

    def __init__(
        self, target: TargetTensors, projection: DraftProjection, options: MedusaOptions
    ) -> None:
        self.target, self.projection, self.options = target, projection, options
        device = target.embedding.device
        blank = MedusaHeads.blank(options.num_heads, options.num_layers, target.config.hidden_size)
        self.parameters: dict[str, Tensor] = {
            "layers": blank.layers,
            "biases": blank.biases,
            "roots": blank.roots,  # type: ignore[dict-item]  # blank heads are grounded
            "parents": blank.parents,  # type: ignore[dict-item]  # likewise
        }
        for name, tensor in self.parameters.items():
            self.parameters[name] = tensor.to(device).requires_grad_()
        self.heads = MedusaHeads(**self.parameters, vocabulary=projection.vocabulary)

    def loss(self, sequences: Sequence[TrainingSequence], seed: int) -> tuple[Tensor, int]:
        """Mean loss of a batch, heads weighted and summed, and the positions it is over."""
        ahead = self.options.num_heads
        rows = _Rows.of(sequences, ahead, self.target)
        soft = torch.cat([self.projection.soft_targets(s) for s in sequences])
        soft = torch.nn.functional.pad(soft, (0, 0, 0, ahead))
        generator = torch.Generator().manual_seed(seed)
        dropped = torch.rand((ahead - 1, rows.count, 1), generator=generator) < PARENT_DROPOUT
        z = self.heads.guesses(rows.hidden, rows.root)
        z = self.heads.given_parent(z, rows.parents * ~dropped.to(rows.hidden.device))
        place = self.projection.index(rows.output)
        total = torch.zeros((), device=z.device)
        for head in range(ahead):
            own = slice(head + 1, head + 1 + rows.count)
            total = total + HEAD_DECAY**head * self.projection.loss(
                z[head],
                soft[own],
                place[own],
                soft_share=self.options.soft_share,
                mask=rows.is_valid[head].float(),
            )
        weight = sum(HEAD_DECAY**head for head in range(ahead))
        return total / (weight * rows.count), rows.count

    @torch.no_grad()
    def evaluate(self, sequences: Sequence[TrainingSequence]) -> dict[str, Any]:
        """Acceptance of each head given the true parent, as `acceptance.summary` has it."""
        ahead = self.options.num_heads
        counts = {kind: AcceptanceCounts.of(ahead) for kind in KINDS}
        for sequence in sequences:
            rows = _Rows.of([sequence], ahead, self.target)
            z = self.heads.given_parent(self.heads.guesses(rows.hidden, rows.root), rows.parents)
            place = self.projection.index(rows.output)
            ranks = torch.stack(
                [
                    self.projection.ranks(z[head], place[head + 1 : head + 1 + rows.count])
                    for head in range(ahead)
                ]
            )
            own = counts[kind_of(sequence.temperature)]
            own.add(ranks.cpu(), rows.is_valid.cpu())
            own.add_chains((ranks == 0)[:, rows.is_valid.all(0)])
        return summary(counts)

    def save(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Write a checkpoint of the heads as they are now."""
        name = {"base_model_name_or_path": self.target.name}
        self.heads.save(folder, {**name, **config}, self.target.embedding.dtype)


@dataclass(frozen=True)
class _Rows:
    """The outputs of a batch of sequences, back to back."""

    count: int
    hidden: Tensor  # [count, hidden]
    output: Tensor  # int64 [count + num_heads], 0 beyond the end
    root: Tensor  # [count, hidden]: embedding of each row's own output token
    parents: Tensor  # [num_heads - 1, count, hidden]: of the tokens 1, 2, ... later
    is_valid: Tensor  # bool [num_heads, count]: the sequence has a token to guess there

    @classmethod
    def of(
        cls, sequences: Sequence[TrainingSequence], num_heads: int, target: TargetTensors
    ) -> _Rows:
        embedding = target.embedding
        device, dtype = embedding.device, embedding.dtype
        hidden = torch.cat([s.hidden for s in sequences]).to(device, dtype)
        output = torch.cat([s.output for s in sequences]).long()
        output = torch.nn.functional.pad(output, (0, num_heads)).to(device)
        left = torch.cat([torch.arange(len(s.hidden) - 1, -1, -1) for s in sequences])
        count = len(hidden)
        embedded = embedding[output]
        parents = [embedded[head : head + count] for head in range(1, num_heads)]
        return cls(
            count,
            hidden,
            output,
            embedded[:count],
            torch.stack(parents) if parents else hidden.new_zeros(0, *hidden.shape),
            torch.stack([left > head for head in range(num_heads)]).to(device),
        )
