"""Candidates: the draft nodes of all requests of a step as flat arrays, and trees made of some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress, pairwise

import numpy as np
from numpy.typing import NDArray

from specdec.tree import DraftTree

Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Candidates:
    """The nodes of `trees`, one tree after the other, roots included; N nodes in all.

    `first[t]` is the place of tree t's root and `first[-1]` is N; `owner[i]` is the tree of node i
    and `parents[i]` its parent's place (a root's is its own). `ranks` are among siblings, in the
    order in which they were drafted.

    Example: `Candidates.of(trees).along_paths(acceptance)` multiplies from the roots down.
    """

    trees: Sequence[DraftTree]
    first: Ints
    owner: Ints
    parents: Ints
    depths: Ints

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
        jump, reach = parents, 1  # that many levels up, or the root
        while depths.max() >= reach:
            depths += depths.take(jump)
            jump, reach = jump.take(jump), 2 * reach
        return cls(trees, first, owner, parents, depths)

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
        first_child = np.full(num_nodes + 1, -1)
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
        worths = conditional.tolist()
        for node, parent in enumerate(self.parents.tolist()):
            if parent != node:
                worths[node] *= worths[parent]
        return np.array(worths)

    def pick(self, is_chosen: Bools, worths: Floats) -> list[DraftTree]:
        """The trees of the chosen nodes; a node's parent must be chosen with it (or be a root).

        A drafter lays its likeliest path first, so that committing it moves nothing; trees that
        were joined are laid anew, by `worths`.
        """
        mask, bounds = is_chosen.tobytes(), pairwise(self.first.tolist())
        return [
            _picked(tree, mask[start:end], worths[start:end])
            for tree, (start, end) in zip(self.trees, bounds, strict=True)
        ]


def is_mixed(tree: DraftTree) -> bool:
    """Whether its nodes have several sources; such a tree was joined and lies as it happened."""
    sources = tree.sources
    return sources.count(sources[-1]) < len(sources) - 1


def _picked(tree: DraftTree, mask: bytes, worths: Floats) -> DraftTree:
    """The tree of the nodes where the mask is 1, which it need not be for the root."""
    count = mask.count(1, 1)
    if count == tree.num_nodes - 1 and not is_mixed(tree):
        return tree
    if count == 0 or tree.draft_probs is not None:
        # Siblings that were drawn together are verified together or not at all.
        return DraftTree.root_only(tree.token_ids[0])
    nodes = compress(range(1, tree.num_nodes), mask[1:])
    if not is_mixed(tree):
        return DraftTree(*_columns(tree, [0, *nodes]))
    order = worths.tolist()
    likeliest_first = sorted(nodes, key=lambda node: -order[node])
    return DraftTree.depth_first(*_columns(tree, [0, *likeliest_first]))


def _columns(
    tree: DraftTree, nodes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], tuple[tuple[str, ...], ...]]:
    """Tokens, parents, scores and sources of some nodes of a tree."""
    place = {node: index for index, node in enumerate(nodes)}
    place[-1] = -1
    return (
        tuple([tree.token_ids[node] for node in nodes]),
        tuple([place[tree.parents[node]] for node in nodes]),
        tuple([tree.scores[node] for node in nodes]),
        tuple([tree.sources[node] for node in nodes]),
    )
