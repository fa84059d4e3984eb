"""The draft projection: loss and gradient are those of the plain formula, ranks those of a sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.drafters.training import projection
from specdec.drafters.training.corpus import TrainingSequence
from specdec.drafters.training.projection import (
    NUM_RANKS,
    DraftProjection,
    coverage,
    draft_vocabulary,
)

VOCAB, HIDDEN, NUM = 50, 16, 23
CHOSEN = torch.tensor([1, 2, 3, 5, 8, 13, 21, 34, 40, 41, 42, 43, 44, 49], dtype=torch.int32)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    values: Tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values


def sequence(output: Tensor, hidden: Tensor | None = None) -> TrainingSequence:
    ids = torch.cat((torch.tensor([7, 7]), output)).int()
    hidden = drawn(len(output), HIDDEN, seed=5) if hidden is None else hidden
    return TrainingSequence(ids, 2, hidden, 0.0, "qa")


@pytest.fixture(params=[None, CHOSEN], ids=["all tokens", "draft vocabulary"])
def vocabulary(request: pytest.FixtureRequest) -> Tensor | None:
    return request.param  # type: ignore[no-any-return]  # pytest's param has no type


@pytest.mark.parametrize("soft_share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rows_at_once", [4, 256])
def test_loss_and_gradient_are_those_of_the_formula(
    soft_share: float,
    rows_at_once: int,
    vocabulary: Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(projection, "ROWS", rows_at_once)
    weight, z, hidden = drawn(VOCAB, HIDDEN), drawn(NUM, HIDDEN, seed=2), drawn(NUM, HIDDEN, seed=3)
    ids = torch.arange(NUM) * 2 % VOCAB
    mask = (torch.arange(NUM) % 3 > 0).float()
    ours = DraftProjection(weight, vocabulary)
    leaf = z.clone().requires_grad_()
    label = ours.index(ids)
    soft = ours.soft_targets(sequence(ids, hidden))
    loss = ours.loss(leaf, soft, label, soft_share=soft_share, mask=mask)
    (3 * loss).backward()

    rows = (weight if vocabulary is None else weight[vocabulary.long()]).double()
    other = z.double().requires_grad_()
    log_shares = F.log_softmax(other @ rows.t(), -1)
    target = F.softmax(hidden.double() @ rows.t(), -1)
    losses = -soft_share * (target * log_shares).sum(1)
    tokens = range(VOCAB) if vocabulary is None else vocabulary.tolist()
    for row, token in enumerate(ids.tolist()):
        if token in tokens:
            losses[row] = losses[row] - (1 - soft_share) * log_shares[row, tokens.index(token)]
    expected = (losses * mask).sum()
    (3 * expected).backward()
    # fp32 rounds each of some hundred sums of terms below 100 by 6e-8 of them.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert other.grad is not None
    torch.testing.assert_close(leaf.grad, other.grad.float(), rtol=1e-4, atol=1e-4)


def test_soft_targets_are_computed_once_per_sequence() -> None:
    ours = DraftProjection(drawn(VOCAB, HIDDEN), CHOSEN)
    own = sequence(torch.arange(9))
    assert ours.soft_targets(own) is ours.soft_targets(own)


def test_the_vocabulary_is_of_the_most_frequent_tokens() -> None:
    texts = [sequence(torch.tensor([9, 9, 9, 4, 4, 6])), sequence(torch.tensor([4, 4, 2, 9]))]
    chosen = draft_vocabulary(texts, 2, VOCAB)
    assert chosen is not None
    assert chosen.tolist() == [4, 9]
    assert chosen.dtype == torch.int32
    assert coverage(texts, chosen) == pytest.approx(8 / 10)
    tied = draft_vocabulary(texts, 3, VOCAB)
    assert tied is not None
    assert tied.tolist() == [2, 4, 9]  # of 2 and 6, as frequent, the lower
    assert draft_vocabulary(texts, VOCAB, VOCAB) is None
    assert coverage(texts, None) == 1.0


def test_tokens_outside_the_vocabulary_have_no_place() -> None:
    ours = DraftProjection(drawn(VOCAB, HIDDEN), CHOSEN)
    assert ours.index(torch.tensor([1, 4, 49])).tolist() == [0, -1, len(CHOSEN) - 1]


def test_ranks_are_those_of_a_sort(
    vocabulary: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection, "ROWS", 5)
    weight, z = drawn(VOCAB, HIDDEN), drawn(NUM, HIDDEN, seed=2)
    ours = DraftProjection(weight, vocabulary)
    label = ours.index(torch.arange(NUM))
    expected = []
    for row, own in zip(z @ ours.weight.t(), label.tolist(), strict=True):
        best = row.argsort(descending=True).tolist()
        expected.append(min(NUM_RANKS, best.index(own)) if own >= 0 else NUM_RANKS)
    assert ours.ranks(z, label).tolist() == expected
    assert len(set(expected)) > 2
