"""Homogeneity: whether two samples of token sequences come from one distribution.

Tokens at a position are compared among the draws with equal tokens before it, history by history:
there they are independent draws of one distribution each, whatever happened earlier. The statistics
of histories add up, and so do their degrees of freedom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST_EXPECTED = 5.0  # of a cell, on both sides (Cochran 1954); rarer tokens are pooled
SHUFFLES = 200  # for the distance that chance makes

Draw = tuple[int, ...]
Counts = NDArray[np.int64]  # [2, num_tokens]: how often each side drew each token


@dataclass(frozen=True)
class Homogeneity:
    """The chi-squared test of one position.

    `variation` is the total variation distance of the two sides, averaged over histories by their
    draws; `by_chance` is what it would be if all draws were of one distribution. Both take every
    token for itself, also those that the test pools.
    """

    statistic: float
    degrees: int
    p_value: float
    variation: float
    by_chance: float
    num_draws: int  # of both sides, in histories that are tested
    num_histories: int

    @classmethod
    def of(cls, plain: Sequence[Draw], other: Sequence[Draw], position: int) -> Homogeneity | None:
        """Of the tokens at a position, from 0; None of too few draws to say anything.

        Example: `Homogeneity.of([(5, 6), (5, 7)] * 40, [(5, 6), (5, 7)] * 40, 1).p_value == 1`.
        """
        from scipy import stats

        rng = np.random.default_rng(0)
        statistic, degrees, num_draws, num_histories = 0.0, 0, 0, 0
        variation = by_chance = 0.0
        for counts in _by_history(plain, other, position):
            cells = pooled(counts)
            if cells.shape[1] < 2:
                continue
            found = stats.chi2_contingency(cells, correction=False)
            size = int(counts.sum())
            statistic += float(found.statistic)
            degrees += int(found.dof)
            num_draws += size
            num_histories += 1
            variation += size * _distance(counts)
            by_chance += size * _chance(counts, rng)
        if not num_draws:
            return None
        return cls(
            statistic,
            degrees,
            float(stats.chi2.sf(statistic, degrees)),
            variation / num_draws,
            by_chance / num_draws,
            num_draws,
            num_histories,
        )

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "chi_squared": self.statistic,
            "degrees": self.degrees,
            "p": self.p_value,
            "variation": self.variation,
            "variation_by_chance": self.by_chance,
            "draws": self.num_draws,
            "histories": self.num_histories,
        }


def pooled(counts: Counts) -> Counts:
    """The tokens expected at least LEAST_EXPECTED times on both sides, the others as one cell.

    counts: [2, num_tokens]. Which are pooled depends on both sides' sum alone, which knows nothing
    of a difference between them. The pool takes the rarest cell in too if it is too small itself.

    Example: `pooled(np.array([[9, 2, 1], [11, 1, 2]]))` has no two cells: [[12], [14]].
    """
    totals = counts.sum(axis=0)
    sides = counts.sum(axis=1)
    least = LEAST_EXPECTED * sides.sum() / max(1, sides.min())
    order = np.argsort(-totals, kind="stable")
    kept = [int(index) for index in order if totals[index] >= least]
    rest = [int(index) for index in order if totals[index] < least]
    if rest and kept and totals[rest].sum() < least:
        rest.append(kept.pop())
    parts = [counts[:, [index]] for index in kept]
    if rest:
        parts.append(counts[:, rest].sum(axis=1, keepdims=True))
    return np.concatenate(parts, axis=1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected for their number (Holm 1979): the chance of one false alarm in all is kept.

    Example: `holm([0.01, 0.04]) == [0.02, 0.04]`.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def _by_history(plain: Sequence[Draw], other: Sequence[Draw], position: int) -> Iterator[Counts]:
    """Counts for every history that both sides have."""
    sides: list[dict[Draw, Counter[int]]] = []
    for draws in (plain, other):
        counted: dict[Draw, Counter[int]] = {}
        for draw in draws:
            if len(draw) > position:
                counted.setdefault(draw[:position], Counter())[draw[position]] += 1
        sides.append(counted)
    for history in sorted(sides[0].keys() & sides[1].keys()):
        ours, theirs = sides[0][history], sides[1][history]
        tokens = sorted(ours.keys() | theirs.keys())
        yield np.array([[side[token] for token in tokens] for side in (ours, theirs)])


def _distance(counts: Counts) -> float:
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def _chance(counts: Counts, rng: np.random.Generator) -> float:
    """The mean distance if the same draws were dealt to the sides at random."""
    totals, size = counts.sum(axis=0), int(counts[0].sum())
    ours = rng.multivariate_hypergeometric(totals, size, size=SHUFFLES, method="marginals")
    theirs = totals - ours
    shares = np.abs(ours / size - theirs / max(1, int(totals.sum()) - size))
    return float(shares.sum(axis=1).mean() / 2)
