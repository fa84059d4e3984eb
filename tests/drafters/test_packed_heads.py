"""PackedHeads: the guesses of MedusaHeads, their parents' terms and the request's noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specdec.drafters import packed_heads
from specdec.drafters.medusa_heads import MedusaHeads
from specdec.drafters.packed_heads import PackedHeads
from specdec.noise import gumbel
from specdec.params import SamplingParams
from specdec.request import Request
from tests.drafters.toy_drafters import EMBEDDING, toy_heads
from tests.toy import ALPHABET, CONFIG, RandomTensors, toy_model

pytestmark = pytest.mark.usefixtures("backend")

VOCAB, HIDDEN = len(ALPHABET), CONFIG["hidden_size"]
UNIT = 2.0**-24
EMBEDDINGS = RandomTensors(CONFIG, 0).get(EMBEDDING)
WORDS = torch.tensor([0, 2, 3, 7, 8, 11, 16, 20, 23], dtype=torch.int32)


def two_layers(num_heads: int = 3, *, has_parents: bool = True) -> MedusaHeads:
    """With weights so small that the bounds of rounding stay small."""
    heads = toy_heads(num_heads=num_heads, num_layers=2, has_parents=has_parents)
    heads.layers /= 4
    return heads


def _with_projections(heads: MedusaHeads) -> MedusaHeads:
    generator = torch.Generator().manual_seed(8)
    heads.projections = torch.randn(heads.num_heads, VOCAB, HIDDEN, generator=generator) / 3
    return heads


def public_heads() -> MedusaHeads:
    """As published: projections of their own, two layers, neither root nor parent."""
    return _with_projections(two_layers(num_heads=4, has_parents=False))


def with_vocabulary(heads: MedusaHeads) -> MedusaHeads:
    heads.vocabulary = WORDS
    return heads


HEADS: dict[str, Callable[[], MedusaHeads]] = {
    "public": public_heads,
    "ours": toy_heads,
    "own projections": lambda: _with_projections(two_layers()),
    "vocabulary": lambda: with_vocabulary(two_layers()),
    "roots only": lambda: _without_parents(toy_heads()),
    "one head": lambda: toy_heads(num_heads=1),
}


def _without_parents(heads: MedusaHeads) -> MedusaHeads:
    heads.parents = None
    return heads


@dataclass(frozen=True)
class Oracle:
    """Logits of all heads given their parents, float64 [num_heads, rows], and how far fp32 may err.

    The error: every product of `HIDDEN` terms errs by that many units of the sum of magnitudes, and
    so does what later products make of it; SiLU's slope is at most 1.1.
    """

    logits: Tensor
    bound: Tensor

    @classmethod
    def of(cls, heads: MedusaHeads, state: Tensor, root: int, parents: Sequence[int]) -> Oracle:
        """parents: of the heads from 1 on; a token outside of the vocabulary adds nothing."""
        words = None if heads.vocabulary is None else heads.vocabulary.tolist()
        rows = EMBEDDINGS if words is None else EMBEDDINGS[words]
        logits, bounds = [], []
        z = heads.guesses(state[None], EMBEDDINGS[root][None])
        if heads.num_heads > 1:
            known = torch.tensor([[words is None or token in words] for token in parents])
            z = heads.given_parent(z, (EMBEDDINGS[list(parents)] * known)[:, None])
        for head in range(heads.num_heads):
            own = rows if heads.projections is None else heads.projections[head]
            size = state.abs()
            if heads.roots is not None:
                size = size + heads.roots[head].abs() @ EMBEDDINGS[root].abs()
            for weight, bias in zip(heads.layers[head], heads.biases[head], strict=True):
                size = size + 1.1 * (weight.abs() @ size + bias.abs())
            if heads.parents is not None and head > 0:
                size = size + heads.parents[head - 1].abs() @ EMBEDDINGS[parents[head - 1]].abs()
            logits.append(own @ z[head, 0])
            num_units = (3 + heads.layers.shape[1]) * (HIDDEN + 8)
            bounds.append(2 * num_units * UNIT * (own.abs() @ size))
        return cls(torch.stack(logits).double(), torch.stack(bounds).double())


def request(name: str, temperature: float = 0.0) -> Request:
    return Request(name, (1, 2, 3, 4), SamplingParams(temperature=temperature, seed=77))


def packed(heads: MedusaHeads) -> PackedHeads:
    return PackedHeads(heads, toy_model().model, EMBEDDINGS, EMBEDDINGS)


def states(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("form", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_guesses_are_those_of_the_heads_below_every_parent(
    form: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_heads, "TRUST", 1.0)  # shares as the heads give them
    heads = HEADS[form]()
    words = list(range(VOCAB)) if heads.vocabulary is None else heads.vocabulary.tolist()
    requests = [request("a"), request("b", temperature)]
    some = states(2)
    roots = [5, 3]
    guesses = packed(heads).guess(some, torch.tensor(roots), requests)
    for req, state, root, own in zip(requests, some, roots, guesses, strict=True):
        inverse = 1.0 if req.params.is_greedy else 1 / req.params.temperature
        for parent in range(VOCAB):  # some of them outside of the vocabulary
            oracle = Oracle.of(heads, state, root, [parent] * (heads.num_heads - 1))
            for head in range(heads.num_heads):
                (found,) = own.children(head, [root if head == 0 else parent], VOCAB)
                want = oracle.logits[head] * inverse
                if not req.params.is_greedy:
                    position = req.num_tokens + head
                    want = want + gumbel(req.seed, position, torch.tensor(words)).double()
                shares = dict(zip(words, want.softmax(0).tolist(), strict=True))
                # Of an error e in every logit, a share is off by a factor exp(2 e).
                error = 2 * float(oracle.bound[head].max()) * inverse + 16 * UNIT
                assert error < 0.05  # a bound that says something
                assert sorted(found.token_ids) == words
                assert found.scores == sorted(found.scores, reverse=True)
                for token_id, score in zip(found.token_ids, found.scores, strict=True):
                    assert score == pytest.approx(shares[token_id], rel=2 * error)


def test_scores_are_flattened_and_the_order_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = packed(toy_heads()).guess(states(1), torch.tensor([5]), [request("a", 1.0)])
    (flat,) = own.children(1, [4], VOCAB)
    monkeypatch.setattr(packed_heads, "TRUST", 1.0)
    (sharp,) = own.children(1, [4], VOCAB)
    assert flat.token_ids == sharp.token_ids
    assert flat.scores[0] < sharp.scores[0] and flat.scores[-1] > sharp.scores[-1]
    ratio = [math.log(a / b) for a, b in zip(flat.scores, sharp.scores, strict=True)]
    logs = [math.log(b) for b in sharp.scores]
    slope = (ratio[0] - ratio[-1]) / (logs[0] - logs[-1])
    assert slope == pytest.approx(-0.3, abs=1e-4)  # shares to the power of 0.7


def test_parents_make_a_difference_where_heads_know_them() -> None:
    """Guards the test above: 24 parents, and a head whose guesses depend on them."""
    for form, num_different in [("ours", 24), ("vocabulary", len(WORDS) + 1), ("public", 1)]:
        heads = HEADS[form]()
        (own,) = packed(heads).guess(states(1), torch.tensor([5]), [request("a")])
        found = own.children(1, range(VOCAB), VOCAB)
        assert len({tuple(ranked.scores) for ranked in found}) == num_different
        below = own.children(0, [5, 6], VOCAB)
        assert below[0] == below[1]  # the parent of head 0 is the root, whatever is asked


def test_guesses_of_several_parents_are_those_of_each() -> None:
    (own,) = packed(toy_heads()).guess(states(1), torch.tensor([5]), [request("a", 1.0)])
    together = own.children(2, [4, 9, 4], 6)
    assert [ranked.token_ids for ranked in together] == [
        own.children(2, [parent], 6)[0].token_ids for parent in (4, 9, 4)
    ]
    assert all(len(ranked.token_ids) == 6 for ranked in together)


def test_requests_beside_each_other_do_not_change_each_others_guesses() -> None:
    heads = packed(toy_heads())
    some, roots = states(3), torch.tensor([5, 6, 7])
    requests = [request("a"), request("b", 1.0), request("c", 0.5)]
    together = heads.guess(some, roots, requests)
    for index, req in enumerate(requests):
        (alone,) = heads.guess(some[index : index + 1], roots[index : index + 1], [req])
        for head in range(3):
            (want,) = alone.children(head, [4], 5)
            assert together[index].children(head, [4], 5) == [want]


def test_memory_counts_the_heads_and_their_tables() -> None:
    few, many = packed(toy_heads(num_heads=2)), packed(toy_heads(num_heads=3))
    layer_root_parent = 3 * HIDDEN * HIDDEN * 4 - HIDDEN * HIDDEN * 4 + VOCAB * HIDDEN * 4
    assert many.num_bytes - few.num_bytes == layer_root_parent
