"""Ranking: a row of a drafter's logits as ranked guesses, with the request's own noise.

The target draws y = argmax(log p_target + g) with Gumbel noise g that depends on the request's
seed, the position and the token alone. A drafter knows g before the target has spoken, so the best
guesses of a drafter with probabilities are those of the largest log p_draft + g (Daliri et al.
2024, arXiv:2408.07978): where p_draft is near p_target they are near y, at any temperature.
Without noise, at temperature 0, they are the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.noise import gumbel_at
from specdec.request import Request


@dataclass(frozen=True)
class Guess:
    """Where a row of logits stands: it is about the token at `position` of `request`."""

    request: Request
    position: int


@dataclass(frozen=True)
class Ranked:
    """Guesses of one row, best first: token ids and estimated acceptances."""

    token_ids: list[int]
    scores: list[float]


def lifted(
    logits: Tensor, request: Request, positions: Sequence[int], vocabulary: Tensor
) -> Tensor:
    """log p_draft / T + g of every token, up to a constant; plain logits where there is no noise.

    logits: fp32 [num_rows, num_tokens], one row per position; vocabulary: int64 [num_tokens], the
    token of each column. The noise is made for all of them: it lifts some from far below the top.
    """
    if request.params.is_greedy:
        return logits
    where = torch.tensor(positions, device=logits.device)
    token_ids = vocabulary.to(logits.device).expand(len(positions), -1)
    inverse = 1.0 / request.params.temperature  # to multiply with, as the Sampler does
    return logits * inverse + gumbel_at(request.seed, where, token_ids)


def rank(
    logits: Tensor,
    guesses: Sequence[Guess],
    count: int,
    vocabulary: Tensor | None = None,
    *,
    uses_noise: bool = True,
) -> list[Ranked]:
    """The `count` best guesses of each row.

    logits: [num_rows, num_tokens], on any device; guesses: one per row, cheapest if those of a
    request stand side by side; vocabulary: int64 [num_tokens], the token of each column, None = its
    number.

    A score is the share of exp(log p_draft / T + g) among all tokens, which is the chance that the
    guess is right if the drafter is as wrong as its own temperature says.

    Example: `rank(logits, [Guess(request, request.num_tokens)], 4)[0].token_ids`.
    """
    rows = logits.float()
    vocabulary = torch.arange(rows.shape[1]) if vocabulary is None else vocabulary
    if uses_noise:
        rows = torch.cat(
            [
                lifted(
                    rows[first : first + len(positions)],
                    guesses[first].request,
                    positions,
                    vocabulary,
                )
                for first, positions in _runs(guesses)
            ]
        )
    values, columns = rows.topk(min(count, rows.shape[1]))
    scores = (values - rows.logsumexp(1, keepdim=True)).exp()
    token_ids = vocabulary[columns.cpu()]
    return [Ranked(ids, own) for ids, own in zip(token_ids.tolist(), scores.tolist(), strict=True)]


def _runs(guesses: Sequence[Guess]) -> list[tuple[int, list[int]]]:
    """First row and positions of each request's run of rows."""
    runs: list[tuple[int, list[int]]] = []
    for row, guess in enumerate(guesses):
        if runs and guesses[runs[-1][0]].request is guess.request:
            runs[-1][1].append(guess.position)
        else:
            runs.append((row, [guess.position]))
    return runs
