"""SimulatedDrafter: trees of scored guesses whose rightness is a known process. No model runs.

Whether a guess is right depends on the request, the position and the drafter alone, never on how
often or by whom it is asked, so every policy meets the same guesses.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specdec.tree import ROOT_SOURCE, DraftTree

Floats = NDArray[np.float64]
Honesty = Literal["calibrated", "over-confident", "under-confident", "uninformative"]

MAX_WIDTH = 4
TOKENS_PER_POSITION = 64  # the true one, one that all wrong drafters may share, then their own
POSITIONS = 1024  # token ids repeat after so many
FLAT_SCORE = 0.5  # of a drafter whose scores say nothing


@dataclass(frozen=True)
class SimulatedDrafter:
    """A drafter by its quality and its cost.

    `quality` multiplies a position's ease into the chance that the best child is right given that
    its parent is, `decay` again per level; further children share what is left, `spread` of it
    each. `honesty` says how the claimed score relates to that chance. `coverage` is the share of
    roots for which there is any guess. A call takes `call_s`, plus `request_s` per request and
    `level_s` per level of the deepest one.

    Example: `SimulatedDrafter("suffix", max_depth=16, coverage=0.5, request_s=5e-5)`.
    """

    name: str
    quality: float = 1.0
    decay: float = 1.0
    width: int = 1
    spread: float = 0.4
    max_depth: int = 8
    max_nodes: int = 64
    coverage: float = 1.0
    honesty: Honesty = "calibrated"
    call_s: float = 0.0
    request_s: float = 0.0
    level_s: float = 0.0

    def __post_init__(self) -> None:
        assert 1 <= self.width <= MAX_WIDTH and self.name != ROOT_SOURCE

    def seconds(self, num_asked: int, depth: int) -> float:
        """Of a call for so many requests."""
        return self.call_s + self.request_s * num_asked + self.level_s * depth

    def chances(self, ease: Floats) -> Floats:
        """[positions, width] true chance of each child at level 1, the likeliest first."""
        best = np.clip(self.quality * ease, 0.0, 1.0)
        ranks = [best]
        for _ in range(1, self.width):
            ranks.append(self.spread * (1.0 - np.sum(ranks, axis=0)))
        return -np.sort(-np.stack(ranks, axis=1), axis=1)

    def claims(self, chances: Floats) -> Floats:
        """[positions, width] the scores that it gives to children of these true chances."""
        match self.honesty:
            case "calibrated":
                return chances
            case "over-confident":
                return np.minimum(1.0, 2.0 * chances)
            case "under-confident":
                return chances**2
            case "uninformative":
                return np.full_like(chances, FLAT_SCORE) / (1.0 + np.arange(chances.shape[1]))


class Guesses:
    """What one drafter guesses for one request: by position, drawn once.

    Position q is that of output token q. Level l of a tree whose root precedes position q guesses
    position q + l - 1.
    """

    def __init__(
        self, drafter: SimulatedDrafter, index: int, ease: Floats, draw: np.random.Generator
    ) -> None:
        self.drafter = drafter
        num_positions = len(ease)
        chances = drafter.chances(ease)
        limits = np.cumsum(chances, axis=1)
        self._luck: list[float] = draw.random(num_positions).tolist()
        is_shared = draw.random(num_positions) < 0.5
        self._is_covered: list[bool] = (draw.random(num_positions) < drafter.coverage).tolist()
        self._limits: list[Any] = (limits[:, 0] if drafter.width == 1 else limits).tolist()
        claims = drafter.claims(chances)
        self._claims: list[Any] = (claims[:, 0] if drafter.width == 1 else claims).tolist()
        own = 2 + MAX_WIDTH * index
        base = np.arange(num_positions) % POSITIONS * TOKENS_PER_POSITION
        self._true: list[int] = base.tolist()
        self._wrong: list[int] = (base + np.where(is_shared, 1, own)).tolist()
        self._own = own
        self._decays = [drafter.decay**level for level in range(drafter.max_depth)]
        self._sources = ((ROOT_SOURCE,), *([(drafter.name,)] * drafter.max_nodes))
        self._parents = tuple(range(-1, drafter.max_nodes))

    def tree(
        self, root: int, position: int, depth: int, node_budget: int, usefulness: float = 1.0
    ) -> DraftTree | None:
        """At most `depth` levels and `node_budget` nodes behind the root; None without a guess.

        `usefulness` multiplies the true chances; the scores do not know of it.
        """
        depth = min(depth, self.drafter.max_depth, len(self._luck) - position)
        node_budget = min(node_budget, self.drafter.max_nodes)
        if not self._is_covered[position] or min(depth, node_budget) <= 0:
            return None
        if self.drafter.width == 1:
            return self._chain(root, position, min(depth, node_budget), usefulness)
        return self._grown(root, position, depth, node_budget, usefulness)

    def _chain(self, root: int, position: int, depth: int, usefulness: float) -> DraftTree:
        end = position + depth
        num_right = 0
        for luck, limit, decay in zip(
            self._luck[position:end], self._limits[position:end], self._decays, strict=False
        ):
            if luck >= limit * decay * usefulness:
                break
            num_right += 1
        turn = position + num_right
        claims = self._claims[position:end]
        if self.drafter.decay != 1.0:
            claims = [c * d for c, d in zip(claims, self._decays, strict=False)]
        return DraftTree(
            (root, *self._true[position:turn], *self._wrong[turn:end]),
            self._parents[: depth + 1],
            (1.0, *claims),
            self._sources[: depth + 1],
        )

    def _grown(
        self, root: int, position: int, depth: int, node_budget: int, usefulness: float
    ) -> DraftTree:
        """Best first by claimed scores, as trained drafters grow their trees."""
        right_rank = [
            self._right_rank(position + level, self._decays[level] * usefulness)
            for level in range(depth)
        ]
        tokens, parents, scores = [root], [-1], [1.0]
        levels = [0]
        heap: list[tuple[float, int, int, float]] = []  # minus the worth, parent, rank, score
        node, worth, width = 0, -1.0, self.drafter.width
        while True:
            if levels[node] < depth:
                decay = self._decays[levels[node]]
                claims = self._claims[position + levels[node]]
                for rank in range(width):
                    score = claims[rank] * decay
                    heapq.heappush(heap, (worth * score, node, rank, score))
            if not heap or len(tokens) > node_budget:
                break
            worth, parent, rank, score = heapq.heappop(heap)
            node, level = len(tokens), levels[parent]
            # Below a wrong node no token is right, whichever it is.
            tokens.append(self._token(position + level, rank, right_rank[level] == rank))
            parents.append(parent)
            scores.append(score)
            levels.append(level + 1)
        return DraftTree.depth_first(tokens, parents, scores, self._sources[: len(tokens)])

    def _right_rank(self, position: int, factor: float) -> int:
        """Which child of the right parent is right; -1 where none is."""
        luck = self._luck[position]
        for rank, limit in enumerate(self._limits[position]):
            if luck < limit * factor:
                return rank
        return -1

    def _token(self, position: int, rank: int, is_right: bool) -> int:
        if is_right:
            return self._true[position]
        if rank == 0:
            return self._wrong[position]
        return self._true[position] + self._own + rank
