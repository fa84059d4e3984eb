"""Growth: a draft tree in the making, grown level by level, best nodes first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from specdec.kernels.segment import ancestor_masks
from specdec.limits import MAX_NODE_BUDGET
from specdec.tree import ROOT_SOURCE, DraftTree


class Growth:
    """Candidates for one request's tree; node 0 is the root.

    A node's worth is the product of the scores from the root to it: the estimated probability that
    it is accepted. Only the `node_budget` worthiest nodes count, so a node below them is never
    added, and nothing below it need be guessed. Nor is anything deeper than `max_depth`.

    Example:
        growth = Growth(root=5, node_budget=4)
        growth.extend(growth.frontier(width=1)[0], [7, 8], [0.6, 0.3])
        growth.extend(growth.frontier(width=1)[0], [9], [0.5])
        growth.tree("medusa").token_ids == (5, 7, 9, 8)
    """

    def __init__(self, root: int, node_budget: int, max_depth: int = MAX_NODE_BUDGET) -> None:
        self.node_budget = node_budget
        self.max_depth = max_depth
        self.token_ids = [root]
        self.parents = [-1]
        self.depths = [0]
        self.worths = [1.0]
        self._scores = [1.0]
        self._level = [0]  # nodes added last, whose children are still to be guessed
        self._kept: list[float] = []  # heap of the worths within the budget, the least first

    @property
    def least_worth(self) -> float:
        """What a node must be worth more than to count."""
        return self._kept[0] if len(self._kept) >= self.node_budget else 0.0

    def frontier(self, width: int, at_least: float = 0.0) -> list[int]:
        """Up to `width` of the deepest nodes that may have children that count, worthiest first.

        A child is worth less than its parent.
        """
        least = max(self.least_worth, at_least)
        alive = [
            node
            for node in self._level
            if self.worths[node] > least and self.depths[node] < self.max_depth
        ]
        self._level = []
        return sorted(alive, key=self.worths.__getitem__, reverse=True)[:width]

    def extend(self, parent: int, token_ids: Sequence[int], scores: Sequence[float]) -> None:
        """Add children, likeliest first, as far as they count."""
        worth = self.worths[parent]
        for token_id, score in zip(token_ids, scores, strict=True):
            value = worth * score
            if value <= self.least_worth:
                break
            if len(self._kept) < self.node_budget:
                heapq.heappush(self._kept, value)
            else:
                heapq.heapreplace(self._kept, value)
            self._level.append(len(self.token_ids))
            self.token_ids.append(token_id)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.worths.append(value)
            self._scores.append(score)

    def with_ancestors(self, nodes: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        """The nodes and all above them, parents first, and the ancestor mask of each."""
        kept = {0}
        for node in nodes:
            while node not in kept:
                kept.add(node)
                node = self.parents[node]
        rows = sorted(kept)
        place = {node: index for index, node in enumerate(rows)}
        return rows, ancestor_masks([-1 if n == 0 else place[self.parents[n]] for n in rows])

    def tree(self, source: str) -> DraftTree:
        """The worthiest nodes; the likeliest path is laid first, so that it need not be moved."""
        order = sorted(range(1, len(self.token_ids)), key=lambda node: (-self.worths[node], node))
        kept = [0, *order[: self.node_budget]]
        place = {node: index for index, node in enumerate(kept)} | {-1: -1}
        return DraftTree.depth_first(
            [self.token_ids[node] for node in kept],
            [place[self.parents[node]] for node in kept],
            [self._scores[node] for node in kept],
            [(ROOT_SOURCE,), *[(source,)] * (len(kept) - 1)],
        )
