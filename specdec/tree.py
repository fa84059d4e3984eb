"""DraftTree: a root plus guessed nodes, parents before children."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import lt

from torch import Tensor

from specdec.kernels.segment import ancestor_masks

ROOT_SOURCE = "target"


@dataclass(frozen=True)
class DraftTree:
    """Guesses for one request's step; node 0 is the root, the last committed token.

    `scores[i]` estimates that node i is accepted given that its parent is, between 0 and 1,
    `sources[i]` names the drafters that guessed it. `draft_probs`, where a drafter sampled its
    guesses, holds per node the distribution [num_nodes, vocab] from which its children were drawn
    without replacement; only the `rejection` rule reads it, and None means point masses.

    Example: `DraftTree((5, 7, 8, 9), (-1, 0, 1, 0), ...)` guesses "7 8" or "9" after root 5.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    sources: tuple[tuple[str, ...], ...]
    draft_probs: Tensor | None = None

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        assert n >= 1 and len(self.parents) == len(self.scores) == len(self.sources) == n
        assert self.parents[0] == -1
        assert all(map(lt, self.parents, range(n))) and min(self.parents[1:], default=0) >= 0

    @classmethod
    def root_only(cls, token_id: int) -> DraftTree:
        """The tree of plain decoding."""
        return cls((token_id,), (-1,), (1.0,), ((ROOT_SOURCE,),))

    @classmethod
    def from_paths(
        cls, root: int, paths: Iterable[Sequence[int]], *, source: str, node_budget: int
    ) -> DraftTree:
        """Merge continuations of the root into one tree, sharing prefixes.

        Earlier paths are laid first (the likeliest path stays contiguous in the KV cache) and
        win when the budget runs out; the score falls with the path's rank.
        """
        builder = TreeBuilder(root, node_budget)
        for rank, path in enumerate(paths):
            node = 0
            for token_id in path:
                child = builder.add(node, token_id, 1.0 / (1 + rank), source)
                if child is None:
                    break
                node = child
        return builder.build()

    @classmethod
    def depth_first(
        cls,
        token_ids: Sequence[int],
        parents: Sequence[int],
        scores: Sequence[float],
        sources: Sequence[tuple[str, ...]],
    ) -> DraftTree:
        """The tree of nodes that are given best first, the root before all.

        The likeliest path is laid first, so that committing it moves nothing.
        """
        num_nodes = len(parents)
        if list(parents) == list(range(-1, num_nodes - 1)):
            return cls(tuple(token_ids), tuple(parents), tuple(scores), tuple(sources))
        children: list[list[int]] = [[] for _ in parents]
        for node in range(num_nodes - 1, 0, -1):
            children[parents[node]].append(node)
        order: list[int] = []
        waiting = [0]
        place = [-1] * (num_nodes + 1)  # the last one is that of the root's parent, -1
        while waiting:
            node = waiting.pop()
            place[node] = len(order)
            order.append(node)
            waiting += children[node]
        return cls(
            tuple([token_ids[node] for node in order]),
            tuple([place[parents[node]] for node in order]),
            tuple([scores[node] for node in order]),
            tuple([sources[node] for node in order]),
        )

    @property
    def num_nodes(self) -> int:
        """Root included."""
        return len(self.token_ids)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node to the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Child nodes of each node, in node order."""
        kids: list[list[int]] = [[] for _ in self.token_ids]
        for node, parent in enumerate(self.parents[1:], start=1):
            kids[parent].append(node)
        return tuple(tuple(k) for k in kids)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the node before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def child_with(self, node: int, token_id: int) -> int | None:
        """The child of `node` that carries `token_id`, or None."""
        for child in self.children[node]:
            if self.token_ids[child] == token_id:
                return child
        return None

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to `node`, both included."""
        nodes = [node]
        while nodes[-1] != 0:
            nodes.append(self.parents[nodes[-1]])
        return tuple(reversed(nodes))

    def path_of(self, token_ids: Iterable[int]) -> list[int]:
        """The nodes below the root that carry these tokens, as far as there are such nodes.

        Example: `DraftTree((5, 7, 8), (-1, 0, 1), ...).path_of([7, 9]) == [1]`.
        """
        parents, own, node = self.parents, self.token_ids, 0
        path: list[int] = []
        for token_id in token_ids:
            child = node
            try:
                child = parents.index(node, child + 1)
                while own[child] != token_id:
                    child = parents.index(node, child + 1)
            except ValueError:  # no further child
                break
            path.append(child)
            node = child
        return path

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Ancestor mask of each node: bit j of entry i says that node i may attend to node j."""
        return ancestor_masks(self.parents)


class TreeBuilder:
    """Grows a DraftTree node by node within a budget.

    A child that exists already is joined: it remembers all sources and its best score.
    """

    def __init__(self, root: int, node_budget: int) -> None:
        self.room = node_budget
        self._token_ids, self._parents = [root], [-1]
        self._scores = [1.0]
        self._sources: list[tuple[str, ...]] = [(ROOT_SOURCE,)]
        self._child_of: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token_id: int, score: float, source: str) -> int | None:
        """The child of `parent` carrying `token_id`, made if new; None once the budget is spent."""
        known = self._child_of.get((parent, token_id))
        if known is not None:
            self._scores[known] = max(self._scores[known], score)
            if source not in self._sources[known]:
                self._sources[known] += (source,)
            return known
        if self.room <= 0:
            return None
        self.room -= 1
        node = len(self._token_ids)
        self._token_ids.append(token_id)
        self._parents.append(parent)
        self._scores.append(score)
        self._sources.append((source,))
        self._child_of[parent, token_id] = node
        return node

    def build(self) -> DraftTree:
        """The tree as it stands."""
        return DraftTree(
            tuple(self._token_ids),
            tuple(self._parents),
            tuple(self._scores),
            tuple(self._sources),
        )
