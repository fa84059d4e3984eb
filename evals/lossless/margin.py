"""Margin: how close the target's choice was between the tokens at which two answers part.

The target chooses the best score: of a greedy request the log-probability, of a sampled one
log p / T + g, g being the noise of the seed at that position (`specdec.noise`). If the scores of
both tokens lie closer to the best than rounding reaches, either could have come of the same
computation in another order: a near tie. Otherwise something took a token that was not the best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from specdec.config import KVPrecision, WeightPrecision
from specdec.noise import gumbel
from specdec.params import MIN_TEMPERATURE

# By precision, what the logits of two tokens may lose to each other. Logits are up to 32 in size:
# a unit in the last place is 2^-3 in bf16 and 2^-6 in fp16, and each of the two may be one off.
# fp32 is no better than its sums over thousands of terms: 128 units of 2^-19.
_TIE_MARGINS = {"bf16": 2.0**-2, "fp16": 2.0**-5, "fp32": 2.0**-12}
COARSE_TIE_MARGIN = _TIE_MARGINS["bf16"]


@dataclass(frozen=True)
class Margin:
    """Scores of the target after the common tokens.

    `top2` is the best score less the second; `gap` how far the worse of the two tokens lies below
    the best. They are equal if both tokens are the two best.
    """

    top2: float
    gap: float

    @classmethod
    def of(
        cls,
        log_probs: Mapping[int, float],
        tokens: tuple[int, int],
        *,
        temperature: float,
        seed: int,
        position: int,
    ) -> Margin:
        """From raw log-probabilities of the likeliest tokens and of the two in question.

        position: of the token in its context, prompt included.

        Example: `Margin.of({5: -0.1, 6: -0.2}, (5, 6), temperature=0, seed=0, position=9)`.
        """
        ids = torch.tensor(list(log_probs))
        scores = torch.tensor(list(log_probs.values()))
        if temperature >= MIN_TEMPERATURE:
            scores = scores / temperature + gumbel(seed, position, ids)
        ranked = scores.sort(descending=True).values
        by_token = dict(zip(log_probs, scores.tolist(), strict=True))
        worse = min(by_token[token] for token in tokens)
        return cls(float(ranked[0] - ranked[1]), float(ranked[0]) - worse)

    def is_near_tie(self, tie_margin: float, temperature: float) -> bool:
        """Whether rounding can explain it; `tie_margin` is of logits, which T divides."""
        scale = temperature if temperature >= MIN_TEMPERATURE else 1.0
        return self.gap <= tie_margin / scale


def default_tie_margin(weights: WeightPrecision | str, kv: KVPrecision) -> float:
    """What rounding can do to the difference of two logits, by the coarsest precision there is.

    weights: resolved, not `auto`. Integer weights and caches are computed with in bf16 at best.

    Example: `default_tie_margin("bf16", "auto") == 0.25`.
    """
    own = _TIE_MARGINS.get(weights, COARSE_TIE_MARGIN)
    return own if kv == "auto" else max(own, _TIE_MARGINS.get(kv, COARSE_TIE_MARGIN))
