"""PackedHeads: Medusa heads packed for one target, and what they guess for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.drafters.medusa_heads import MedusaHeads
from specdec.drafters.ranking import Ranked, lifted
from specdec.request import Request
from specdec.target import Target

NUM_CANDIDATES = 64  # of a head, among which the parent decides
# Heads are surer than they are right: scores flattened by this choose the better nodes
# (docs/lab-log.md). The order of the guesses stays.
TRUST = 0.7


class PackedHeads:
    """The same guesses as `MedusaHeads`, in the target's packed products.

    embedding, projection: [vocab, hidden], the target's, as its checkpoint has them. What a parent
    adds to the state is computed for every token that can be a parent when the heads are loaded, so
    that a tree of any shape costs one product with the projection, for all heads together.
    """

    def __init__(
        self, heads: MedusaHeads, target: Target, embedding: Tensor, projection: Tensor
    ) -> None:
        self.num_heads, self._num_layers, hidden = heads.biases.shape
        self._embedding = embedding
        self._biases = heads.biases.float()
        make = target.make_linear
        self._roots = None if heads.roots is None else make(heads.roots.reshape(-1, hidden))
        self._layers = [[make(weight) for weight in layers] for layers in heads.layers]
        if heads.projections is None:
            vocabulary = heads.vocabulary
            rows = projection if vocabulary is None else projection[vocabulary.long()]
            self._shared = make(rows)
            self._rows = rows.expand(self.num_heads, *rows.shape)
            self._own = []
        else:
            self._own = [make(weight) for weight in heads.projections]
            self._rows = heads.projections
        self._vocabulary = (
            torch.arange(self._rows.shape[1])
            if heads.vocabulary is None
            else heads.vocabulary.long()
        )
        self._column_of = torch.full((len(embedding),), -1, dtype=torch.int64)
        self._column_of[self._vocabulary] = torch.arange(len(self._vocabulary))
        self._parent_terms: list[Tensor | None] = [None] * self.num_heads
        if heads.parents is not None:
            tokens = embedding[self._vocabulary].float()
            self._parent_terms[1:] = [
                (tokens @ weight.float().t()).to(embedding.dtype) for weight in heads.parents
            ]

    @property
    def num_bytes(self) -> int:
        """Memory of the packed heads and of the tables, but not of the target's own tensors."""
        packed = [linear for layers in self._layers for linear in layers]
        packed += self._own or [self._shared]
        packed += [] if self._roots is None else [self._roots]
        products = sum(linear.num_bytes for linear in packed)
        tables = [term for term in self._parent_terms if term is not None]
        return products + sum(term.nbytes for term in tables) + self._rows[0].nbytes

    def guess(
        self, states: Tensor, roots: Tensor, requests: Sequence[Request], *, uses_noise: bool = True
    ) -> list[HeadGuesses]:
        """What all heads say for each request.

        states: fp32 [n, hidden], the target's states that chose the roots; roots: int64 [n].
        """
        z = self._states(states, roots)  # [num_heads, n, hidden]
        logits = self._logits(z).float()  # [num_heads, n, rows]
        guesses = []
        for index, request in enumerate(requests):
            rows = logits[:, index]
            inverse = 1.0
            if uses_noise and not request.params.is_greedy:
                positions = range(request.num_tokens, request.num_tokens + self.num_heads)
                rows = lifted(rows, request, positions, self._vocabulary)
                inverse = 1.0 / request.params.temperature
            values, columns = rows.topk(min(NUM_CANDIDATES, rows.shape[1]))
            guesses.append(HeadGuesses(self, values.cpu(), columns.cpu(), inverse))
        return guesses

    def _states(self, states: Tensor, roots: Tensor) -> Tensor:
        count = len(states)
        x = states.expand(self.num_heads, *states.shape)
        if self._roots is not None:
            terms = self._roots(self._embedding[roots].float()).float().cpu()
            x = x + terms.view(count, self.num_heads, -1).transpose(0, 1)
        grown = []
        for head, layers in enumerate(self._layers):
            row = x[head]
            for layer, linear in enumerate(layers):
                row = row + F.silu(linear(row).float().cpu() + self._biases[head, layer])
            grown.append(row)
        return torch.stack(grown)

    def _logits(self, z: Tensor) -> Tensor:
        if self._own:
            return torch.stack([own(rows) for own, rows in zip(self._own, z, strict=True)])
        logits: Tensor = self._shared(z.flatten(0, 1)).unflatten(0, z.shape[:2])
        return logits

    def parent_logits(self, head: int, parents: Sequence[int], columns: Tensor) -> Tensor | None:
        """What parents add to the logits of a head's candidates [num_parents, num_candidates].

        None where parents make no difference to the head.
        """
        terms = self._parent_terms[head]
        if terms is None:
            return None
        places = self._column_of[torch.tensor(parents)]
        known = (places >= 0).float()[:, None]
        return (terms[places].float() * known) @ self._rows[head][columns].float().t()

    def tokens(self, columns: Tensor) -> Tensor:
        """Token ids of columns of the logits."""
        return self._vocabulary[columns]


@dataclass(frozen=True)
class HeadGuesses:
    """Candidates of each head for one request: [num_heads, num_candidates], best first.

    `values` are logits, over the temperature and with the request's noise where it samples: head i
    guesses the token at position `num_tokens + i`.
    """

    heads: PackedHeads
    values: Tensor
    columns: Tensor
    inverse_temperature: float

    def children(self, head: int, parents: Sequence[int], count: int) -> list[Ranked]:
        """The `count` best guesses of a head below each parent token: see ranking.py."""
        values = self.values[head][None]
        added = self.heads.parent_logits(head, parents, self.columns[head])
        if added is not None:
            values = values + added * self.inverse_temperature
        order = values.topk(min(count, values.shape[1])).indices
        scores = (TRUST * values).softmax(1).gather(1, order)
        token_ids = self.heads.tokens(self.columns[head][order])
        ranked = [
            Ranked(ids, own) for ids, own in zip(token_ids.tolist(), scores.tolist(), strict=True)
        ]
        return ranked if added is not None else ranked * len(parents)
