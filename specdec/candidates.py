"""Candidates: the draft nodes of all requests of a step as flat arrays, and trees made of some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np
from numpy.typing import NDArray

from specdec.tree import DraftTree

Ints = NDArray[np.intp]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Candidates:
    """The nodes of `trees`, one tree after the other, roots included; N nodes in all.

    `first[t]` is the place of tree t's root and `first[-1]` is N; `owner[i]` is the tree of node i
    and `parents[i]` its parent's place (a root's is its own). `ranks` are among siblings, in the
    order in which they were drafted. `jumps` are the parents, the parents' parents, and so
    on in powers of two, until all are roots.

    Example: `Candidates.of(trees).along_paths(acceptance)` multiplies from the roots down.
    """

    trees: Sequence[DraftTree]
    first: Ints
    owner: Ints
    parents: Ints
    depths: Ints
    jumps: Sequence[Ints]

    @classmethod
    def of(cls, trees: Sequence[DraftTree]) -> Candidates:
        """Lay the trees out."""
        sizes = [len(tree.parents) for tree in trees]
        num_nodes = sum(sizes)
        parents = np.fromiter(
            chain.from_iterable([tree.parents for tree in trees]), np.intp, num_nodes
        )
        depths = np.ones(num_nodes, dtype=np.intp)
        if len(trees) == 1:
            first = np.array((0, num_nodes))
            owner = np.zeros(num_nodes, dtype=np.intp)
            parents[0] = depths[0] = 0
        else:
            first = np.zeros(len(trees) + 1, dtype=np.intp)
            np.cumsum(sizes, out=first[1:])
            owner = np.repeat(np.arange(len(trees)), sizes)
            parents += first.take(owner)
            roots = first[:-1]
            parents[roots] = roots
            depths[roots] = 0
        jumps = [parents]
        depths += depths.take(parents)
        reach = 2
        while depths.max() >= reach:
            jumps.append(jumps[-1].take(jumps[-1]))
            depths += depths.take(jumps[-1])
            reach *= 2
        return cls(trees, first, owner, parents, depths, jumps)

    @property
    def num_nodes(self) -> int:
        """Roots included."""
        return len(self.parents)

    @property
    def ranks(self) -> Ints:
        """Each node's place among its siblings: 0, 1, or 2 for all further ones and for roots."""
        num_nodes = self.num_nodes
        parents = self.parents.copy()
        parents[self.first[:-1]] = num_nodes  # a root is nobody's child
        places = np.arange(num_nodes)
        first_child = np.empty(num_nodes + 1, dtype=np.intp)
        first_child[parents[::-1]] = places[::-1]  # of several writes the last one stays
        ranks = np.full(num_nodes, 2)
        ranks[first_child[:-1].take(self.parents) == places] = 0
        rest = np.flatnonzero(ranks)
        if len(rest) > len(self.trees):
            first_child[parents.take(rest)[::-1]] = rest[::-1]
            ranks[rest[first_child.take(parents.take(rest)) == rest]] = 1
        ranks[self.first[:-1]] = 2
        return ranks

    @property
    def scores(self) -> Floats:
        """The drafters' own estimates."""
        return np.fromiter(
            chain.from_iterable([tree.scores for tree in self.trees]), np.float64, self.num_nodes
        )

    def along_paths(self, conditional: Floats) -> Floats:
        """Products of `conditional` from the root to each node; the roots' must be 1."""
        worths = conditional.copy()
        for jump in self.jumps:
            worths *= worths.take(jump)
        return worths

    def pick(self, is_chosen: NDArray[np.bool_], worths: Floats) -> list[DraftTree]:
        """The trees of the chosen nodes; a node's parent must be chosen with it (or be a root).

        A drafter lays its likeliest path first, so that committing it moves nothing; trees that
        were joined are laid anew, by `worths`.
        """
        if not is_chosen.any():
            return [DraftTree.root_only(tree.token_ids[0]) for tree in self.trees]
        is_kept = is_chosen.copy()
        is_kept[self.first[:-1]] = True
        places = np.cumsum(is_kept) - 1
        firsts = places.take(self.first[:-1])
        parents = (places.take(self.parents) - firsts.take(self.owner))[is_kept].tolist()
        bounds, starts = self.first.tolist(), [*firsts.tolist(), len(parents)]
        mask = is_kept.tobytes()
        picked = []
        for index, tree in enumerate(self.trees):
            first, end = starts[index], starts[index + 1]
            if end - first == tree.num_nodes and _is_of_one_drafter(tree):
                picked.append(tree)
            elif end - first == 1 or tree.draft_probs is not None:
                # Siblings that were drawn together are verified together or not at all.
                picked.append(DraftTree.root_only(tree.token_ids[0]))
            else:
                own = mask[bounds[index] : bounds[index + 1]]
                parents[first] = -1
                kept = DraftTree(
                    tuple(compress(tree.token_ids, own)),
                    tuple(parents[first:end]),
                    tuple(compress(tree.scores, own)),
                    tuple(compress(tree.sources, own)),
                )
                if not (kept.is_chain or _is_of_one_drafter(tree)):
                    order = worths[bounds[index] : bounds[index + 1]].tolist()
                    kept = _likeliest_first(kept, tuple(compress(order, own)))
                picked.append(kept)
        return picked


def _likeliest_first(tree: DraftTree, worths: Sequence[float]) -> DraftTree:
    order = sorted(range(1, tree.num_nodes), key=lambda node: -worths[node])
    order.insert(0, 0)
    place = {node: index for index, node in enumerate(order)}
    place[-1] = -1
    return DraftTree.depth_first(
        [tree.token_ids[node] for node in order],
        [place[tree.parents[node]] for node in order],
        [tree.scores[node] for node in order],
        [tree.sources[node] for node in order],
    )


def _is_of_one_drafter(tree: DraftTree) -> bool:
    """Its drafter laid it as it should be; a joined one lies as it happened."""
    sources = tree.sources
    return sources.count(sources[-1]) == len(sources) - 1
