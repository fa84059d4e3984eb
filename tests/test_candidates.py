"""Candidates: places, depths and ranks of many trees' nodes, and trees made of some of them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.candidates import Bools, Candidates
from specdec.tree import DraftTree
from tests.candidate_trees import BAD_SCORES, ONE, SCORES, TWO, chain_of, tree_of, trees

some_trees = st.lists(trees(), min_size=1, max_size=5)


def chosen(count: int, *nodes: int) -> Bools:
    mask = np.zeros(count, dtype=bool)
    mask[list(nodes)] = True
    return mask


@given(drafted=some_trees)
def test_places_depths_and_ranks(drafted: list[DraftTree]) -> None:
    candidates = Candidates.of(drafted)
    at = 0
    for index, tree in enumerate(drafted):
        assert candidates.first[index] == at
        for node in range(tree.num_nodes):
            place = at + node
            parent = tree.parents[node]
            assert candidates.owner[place] == index
            assert candidates.depths[place] == len(tree.path(node)) - 1
            if node == 0:
                assert candidates.parents[place] == place and candidates.ranks[place] == 2
                continue
            assert candidates.parents[place] == at + parent
            assert candidates.ranks[place] == min(2, tree.children[parent].index(node))
        at += tree.num_nodes
    assert candidates.first[-1] == candidates.num_nodes == at


@given(drafted=st.lists(trees(scores=SCORES + BAD_SCORES), min_size=1, max_size=5))
def test_scores_are_the_drafters(drafted: list[DraftTree]) -> None:
    scores = [score for tree in drafted for score in tree.scores]
    np.testing.assert_array_equal(Candidates.of(drafted).scores, scores)


@given(drafted=some_trees, data=st.data())
def test_along_paths(drafted: list[DraftTree], data: st.DataObject) -> None:
    """Products from the root down, one factor at a time."""
    candidates = Candidates.of(drafted)
    size = candidates.num_nodes
    factors = np.array(data.draw(st.lists(st.floats(1e-4, 1.0), min_size=size, max_size=size)))
    factors[candidates.first[:-1]] = 1.0
    found = candidates.along_paths(factors).tolist()
    for index, tree in enumerate(drafted):
        start = int(candidates.first[index])
        for node in range(tree.num_nodes):
            product = 1.0
            for step in tree.path(node):
                product *= float(factors[start + step])
            assert found[start + node] == product


def test_deep_chain() -> None:
    """Deeper than any power of two minus one that could be mistaken for an end."""
    for length in (1, 2, 3, 4, 7, 8, 9, 255):
        assert Candidates.of([chain_of(length), chain_of(1)]).depths.tolist() == [
            *range(length + 1),
            *range(2),
        ]


@given(drafted=some_trees, data=st.data())
def test_pick_keeps_the_chosen_paths(drafted: list[DraftTree], data: st.DataObject) -> None:
    candidates = Candidates.of(drafted)
    keep = data.draw(st.lists(st.booleans(), min_size=0, max_size=candidates.num_nodes))
    mask = np.zeros(candidates.num_nodes, dtype=bool)
    mask[: len(keep)] = keep
    roots = candidates.first[:-1]
    mask[roots] = True
    for node, parent in enumerate(candidates.parents.tolist()):
        mask[node] &= mask[parent]
    mask[roots] = False
    worths = candidates.along_paths(np.where(np.arange(len(mask)) == candidates.parents, 1.0, 0.5))
    for index, (tree, kept) in enumerate(zip(drafted, candidates.pick(mask, worths), strict=True)):
        start = int(candidates.first[index])
        wanted = [_path_of(tree, node) for node in range(1, tree.num_nodes) if mask[start + node]]
        assert sorted(_path_of(kept, node) for node in range(1, kept.num_nodes)) == sorted(wanted)


def test_a_whole_tree_of_one_drafter_is_the_same_object() -> None:
    tree = tree_of([0, 0, 1])
    assert Candidates.of([tree]).pick(chosen(4, 1, 2, 3), np.ones(4))[0] is tree


def test_a_pruned_tree_keeps_its_drafters_order() -> None:
    tree = tree_of([0, 0, 1, 2], [0.1, 0.9, 0.1, 0.9])
    (kept,) = Candidates.of([tree]).pick(chosen(5, 1, 2, 4), np.array([0, 0.1, 0.9, 0.01, 0.8]))
    assert (kept.token_ids, kept.parents) == ((0, 1, 2, 4), (-1, 0, 0, 2))
    assert kept.scores == (1.0, 0.1, 0.9, 0.9)


def test_a_joined_tree_is_laid_likeliest_path_first() -> None:
    tree = tree_of([0, 0, 1, 2], [0.1, 0.9, 0.1, 0.9], [ONE, TWO, ONE, TWO])
    worths = np.array([0, 0.1, 0.9, 0.01, 0.8])
    (kept,) = Candidates.of([tree]).pick(chosen(5, 1, 2, 3, 4), worths)
    assert (kept.token_ids, kept.parents) == ((0, 2, 4, 1, 3), (-1, 0, 1, 0, 3))
    assert kept.sources[1:] == (TWO, TWO, ONE, ONE)


def test_equally_worthy_nodes_of_a_joined_tree_stay_as_they_were_drafted() -> None:
    tree = tree_of([0, 0, 0], None, [ONE, TWO, ONE])
    (kept,) = Candidates.of([tree]).pick(chosen(4, 1, 2, 3), np.full(4, 0.5))
    assert kept.token_ids == (0, 1, 2, 3)


def test_siblings_that_were_drawn_together_stay_together_or_go() -> None:
    drawn = DraftTree((0, 1, 2), (-1, 0, 0), (1.0, 0.5, 0.5), (("x",), ONE, ONE), torch.ones(3, 4))
    candidates = Candidates.of([drawn])
    assert candidates.pick(chosen(3, 1, 2), np.ones(3))[0] is drawn
    assert candidates.pick(chosen(3, 1), np.ones(3)) == [DraftTree.root_only(0)]


def _path_of(tree: DraftTree, node: int) -> list[tuple[int, float, tuple[str, ...]]]:
    return [(tree.token_ids[n], tree.scores[n], tree.sources[n]) for n in tree.path(node)[1:]]
