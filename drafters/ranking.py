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

NUM_GREEDY, NUM_SAMPLED = 16, 256  # tokens looked at: noise lifts some from far below the top


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


def rank(
    logits: Tensor,
    guesses: Sequence[Guess],
    count: int,
    vocabulary: Tensor | None = None,
    *,
    uses_noise: bool = True,
) -> list[Ranked]:
    """The `count` best guesses of each row.

    logits: [num_rows, num_tokens], on any device; guesses: one per row; vocabulary: int64
    [num_tokens], the token of each column, None = its number.

    A score is the share of exp(log p_draft / T + g) among the tokens looked at, which is the
    chance that the guess is right if the drafter is as wrong as its own temperature says.

    Example: `rank(logits, [Guess(request, request.num_tokens)], count=4)[0].token_ids`.
    """
    is_greedy = [guess.request.params.is_greedy or not uses_noise for guess in guesses]
    wide = NUM_GREEDY if all(is_greedy) else NUM_SAMPLED
    wide = max(count, min(wide, logits.shape[1]))
    values, columns = logits.float().topk(min(wide, logits.shape[1]))
    total = logits.float().logsumexp(1).cpu() if any(is_greedy) else None
    values, columns = values.cpu(), columns.cpu()
    token_ids = columns if vocabulary is None else vocabulary[columns]
    ranked: list[Ranked | None] = [None] * len(guesses)
    for rows in _by_request(guesses):
        request = guesses[rows[0]].request
        if is_greedy[rows[0]]:
            assert total is not None
            scores = (values[rows] - total[rows, None]).exp()
            order = None
        else:
            positions = torch.tensor([guesses[row].position for row in rows])
            noise = gumbel_at(request.seed, positions, token_ids[rows])
            # Multiplied as the Sampler does it, and ranked before softmax makes near values equal.
            perturbed = values[rows] * (1.0 / request.params.temperature) + noise
            order = perturbed.topk(min(count, perturbed.shape[1])).indices
            scores = perturbed.softmax(1).gather(1, order)
        for index, row in enumerate(rows):
            ids = token_ids[row] if order is None else token_ids[row][order[index]]
            ranked[row] = Ranked(ids[:count].tolist(), scores[index][:count].tolist())
    return [found for found in ranked if found is not None]


def _by_request(guesses: Sequence[Guess]) -> list[list[int]]:
    rows: dict[str, list[int]] = {}
    for row, guess in enumerate(guesses):
        rows.setdefault(guess.request.request_id, []).append(row)
    return list(rows.values())
