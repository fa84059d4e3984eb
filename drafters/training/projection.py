"""DraftProjection: the rows of the target's output projection that drafts choose among."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.drafters.training.corpus import RowCache, TrainingSequence

ROWS = 256  # logits of so many rows at once: 4 MB in bf16 at 8192 tokens, which caches hold
NUM_RANKS = 10


def draft_vocabulary(
    sequences: Sequence[TrainingSequence], size: int, vocab_size: int
) -> Tensor | None:
    """The tokens most frequent in the outputs, ascending, int32 [size].

    None if `size` is not smaller than the target's vocabulary (FR-Spec, Zhao et
    al. 2025: a draft seldom needs the rare tokens, and the projection is most of its cost).
    """
    if size >= vocab_size:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sequence in sequences:
        counts += torch.bincount(sequence.output, minlength=vocab_size)
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    return chosen.int()


def coverage(sequences: Sequence[TrainingSequence], vocabulary: Tensor | None) -> float:
    """Share of the output tokens that can be drafted."""
    if vocabulary is None:
        return 1.0
    found = [torch.isin(sequence.output, vocabulary) for sequence in sequences]
    return float(torch.cat(found).float().mean())


class DraftProjection:
    """Logits over the draft vocabulary, and a loss on them that never keeps them.

    `weight` are the rows kept, [draft_vocab, hidden], in the dtype of the products.
    """

    def __init__(self, weight: Tensor, vocabulary: Tensor | None) -> None:
        """`weight` is the target's whole projection [vocab, hidden], on the training's device."""
        self.vocabulary = vocabulary
        rows = torch.arange(len(weight)) if vocabulary is None else vocabulary.long()
        self._index = torch.full((len(weight),), -1)
        self._index[rows] = torch.arange(len(rows))
        self._index = self._index.to(weight.device)
        self.weight = weight if vocabulary is None else weight[rows.to(weight.device)]
        self._cache = RowCache()

    def index(self, token_ids: Tensor) -> Tensor:
        """Each token's place in the draft vocabulary, -1 where it is not in it, int64."""
        places: Tensor = self._index[token_ids]
        return places

    @torch.no_grad()
    def soft_targets(self, sequence: TrainingSequence) -> Tensor:
        """Mean of the rows of `weight` under the target's distribution, [num_outputs, hidden].

        That mean is all of the distribution a linear projection's cross-entropy needs:
        sum_v q_v (lse(z W') - z W_v') = lse(z W') - z (q W)'. Temperature 1, draft vocabulary.
        """
        rows = self._cache.get(sequence)
        if rows is None:
            hidden = sequence.hidden.to(self.weight.device, self.weight.dtype)
            rows = torch.cat(
                [_softmax(part @ self.weight.t()) @ self.weight for part in _parts(hidden)]
            )
            self._cache.put(sequence, rows)
        return rows

    def loss(
        self, z: Tensor, soft: Tensor, label: Tensor, *, soft_share: float, mask: Tensor
    ) -> Tensor:
        """Sum over rows of the cross-entropy with soft targets mixed with the label's own.

        z: [n, hidden], differentiable; soft: [n, hidden] as `soft_targets` gives; label: int64 [n]
        places in the draft vocabulary, -1 = outside, where only the soft part counts; mask:
        [n], 0 for rows that do not count.
        """
        loss: Tensor = _ProjectedLoss.apply(  # type: ignore[no-untyped-call]  # torch's apply has no types
            z, self.weight, soft, label, soft_share, mask
        )
        return loss

    @torch.no_grad()
    def ranks(self, z: Tensor, label: Tensor) -> Tensor:
        """Place of the label among the row's best guesses, int64 [n]; NUM_RANKS where behind."""
        num_ranks = min(NUM_RANKS, len(self.weight))
        found = []
        for part, own in zip(_parts(z.to(self.weight.dtype)), _parts(label), strict=True):
            best = (part @ self.weight.t()).topk(num_ranks).indices
            hit = best == own[:, None]
            found.append(torch.where(hit.any(1), hit.int().argmax(1), NUM_RANKS))
        return torch.cat(found) if found else label.new_zeros(0)


class _ProjectedLoss(torch.autograd.Function):
    """Computes the gradient with the loss, part by part, so that logits need no memory."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        weight: Tensor,
        soft: Tensor,
        label: Tensor,
        soft_share: float,
        mask: Tensor,
    ) -> Tensor:
        is_inside = label >= 0
        place = label.clamp_min(0)
        hard = (is_inside * (1 - soft_share))[:, None]
        aim = soft.float() * soft_share + weight[place].float() * hard
        scale = soft_share + hard  # a row without label has only the soft part's weight
        low = z.to(weight.dtype)
        grad = torch.empty_like(z, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float64, device=z.device)
        for begin in range(0, len(z), ROWS):
            part = slice(begin, begin + ROWS)
            logits = low[part] @ weight.t()
            own = place[part, None]
            own_logit = logits.gather(1, own).float()
            shares = _softmax(logits)  # overwrites the logits
            log_sum = own_logit - shares.gather(1, own).float().clamp_min(_TINY).log()
            means = (shares @ weight).float()
            reached = (z[part].float() * aim[part]).sum(1, keepdim=True)
            total += ((scale[part] * log_sum - reached) * mask[part, None]).sum()
            grad[part] = (scale[part] * means - aim[part]) * mask[part, None]
        ctx.save_for_backward(grad)
        return total.float()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (grad,) = ctx.saved_tensors
        return grad * grad_output, None, None, None, None, None


_TINY = 1e-37  # bf16 and fp32 have it as a normal number


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension in place; sums are in fp32 whatever the dtype."""
    return torch.softmax(logits, -1, out=logits)


def _parts(rows: Tensor) -> Iterator[Tensor]:
    for begin in range(0, len(rows), ROWS):
        yield rows[begin : begin + ROWS]
