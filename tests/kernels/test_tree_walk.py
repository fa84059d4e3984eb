"""The tree walk kernel against the coupled rule of `specdec.verification`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels import tree_walk as module
from specdec.kernels.tree_walk import MAX_NODES, MAX_PATH, TreeWalk, tree_walk
from specdec.tree import ROOT_SOURCE, DraftTree
from specdec.verification import Verdict, verify
from tests.kernels.device import DEVICE
from tests.kernels.guard import POISON, guarded_results, surrounded


def tree_of(parents: Sequence[int], token_ids: Sequence[int]) -> DraftTree:
    n = len(parents)
    return DraftTree(tuple(token_ids), tuple(parents), (0.0,) * n, ((ROOT_SOURCE,),) * n)


def random_tree(rng: random.Random, num_nodes: int, vocab_size: int) -> DraftTree:
    """Any shape, from bushes to near-chains; with few tokens siblings are often duplicates."""
    reach = rng.choice([1, 2, 5, num_nodes])
    parents = [-1, *(rng.randrange(max(0, node - reach), node) for node in range(1, num_nodes))]
    return tree_of(parents, [rng.randrange(vocab_size) for _ in parents])


def flat(parts: Sequence[Sequence[int]]) -> Tensor:
    """int32, with neighbours that belong to no tree but would match anything."""
    numbers = torch.tensor([x for part in parts for x in part], dtype=torch.int32)
    return surrounded(numbers, 0).to(DEVICE)


def walk(
    trees: Sequence[DraftTree],
    choices: Sequence[Sequence[int]],
    is_finite: Sequence[Sequence[int]] | None = None,
    max_path: int = MAX_PATH,
) -> TreeWalk:
    first_node = [0]
    for tree in trees:
        first_node.append(first_node[-1] + tree.num_nodes)
    # A node of that number would be taken for a result that was not written.
    is_large = any(tree.num_nodes > POISON for tree in trees)
    with nullcontext() if is_large else guarded_results(module):
        return tree_walk(
            flat(choices),
            flat(is_finite or [[1] * tree.num_nodes for tree in trees]),
            flat([tree.token_ids for tree in trees]),
            flat([tree.parents for tree in trees]),
            flat([first_node]),
            max_path,
        )


def coupled(tree: DraftTree, choices: Sequence[int]) -> Verdict:
    """The rule's own walk; the stub's rows carry the choice."""
    sampler: Any = SimpleNamespace(choose=lambda row, output_ids: int(row[0]))
    return verify("coupled", tree, torch.tensor(choices)[:, None], sampler, [])


def check(got: TreeWalk, trees: Sequence[DraftTree], choices: Sequence[Sequence[int]]) -> int:
    """Equality with the rule, and -1 behind it. Returns the longest accepted length."""
    assert got.buffer.is_contiguous() and got.buffer.dtype == torch.int32
    longest = 0
    for index, (tree, chosen) in enumerate(zip(trees, choices, strict=True)):
        want = coupled(tree, chosen)
        length = want.accepted_length
        assert int(got.num_accepted[index]) == length
        assert int(got.is_finite[index]) == 1
        assert got.tokens[index].tolist() == [*want.token_ids] + [-1] * (got.max_path - length)
        assert got.path[index].tolist() == [*want.path] + [-1] * (got.max_path - length)
        longest = max(longest, length)
    return longest


@pytest.mark.parametrize("larger", [(), (255, MAX_NODES, 1)])
@pytest.mark.parametrize("vocab_size", [2, 3, 76])
def test_random_trees(vocab_size: int, larger: tuple[int, ...]) -> None:
    rng = random.Random(vocab_size)
    sizes = [1, 2, 3, 9, 33, 70, 1, *(rng.randrange(1, 40) for _ in range(30)), *larger]
    trees = [random_tree(rng, size, vocab_size) for size in sizes]
    choices = [[rng.randrange(vocab_size) for _ in tree.token_ids] for tree in trees]
    for tree, chosen in zip(trees, choices, strict=True):
        for node, children in enumerate(tree.children):  # most nodes choose what a child carries
            if children and rng.random() < 0.9:
                chosen[node] = tree.token_ids[rng.choice(children)]
    assert check(walk(trees, choices), trees, choices) > 3


def test_a_chain_of_every_node_is_accepted() -> None:
    tokens = [node * 7 % 61 for node in range(MAX_NODES)]
    tree = tree_of(range(-1, MAX_NODES - 1), tokens)
    choices = [*tokens[1:], 5]
    assert check(walk([tree], [choices]), [tree], [choices]) == MAX_PATH


def test_the_first_of_equal_siblings_is_taken() -> None:
    tree = tree_of([-1, 0, 0, 0, 1, 2], [9, 4, 5, 5, 6, 6])
    choices = [[5, 0, 6, 6, 0, 8]]
    got = walk([tree], choices, max_path=4)
    assert got.path.tolist() == [[2, 5, -1, -1]]
    assert got.tokens.tolist() == [[5, 6, 8, -1, -1]]
    check(got, [tree], choices)


@pytest.mark.parametrize("node", [0, 1, 2, 3])
def test_a_tree_that_is_not_finite_accepts_nothing(node: int) -> None:
    """And its neighbours do not notice."""
    tree = tree_of([-1, 0, 1, 0], [9, 4, 5, 6])
    choices = [[4, 5, 8, 8]] * 3
    is_finite = [[1] * 4, [int(n != node) for n in range(4)], [1] * 4]
    got = walk([tree] * 3, choices, is_finite)
    assert got.num_accepted.tolist() == [2, 0, 2]
    assert got.is_finite.tolist() == [1, 0, 1]
    assert got.tokens[1].tolist() == [4] + [-1] * MAX_PATH
    assert got.path[1].tolist() == [-1] * MAX_PATH
    assert got.tokens[2, :3].tolist() == [4, 5, 8]


@pytest.mark.parametrize("max_path", [0, 1, 2, 3, 4])
def test_a_walk_ends_where_the_buffer_does(max_path: int) -> None:
    tree = tree_of([-1, 0, 1, 2], [9, 4, 5, 6])
    got = walk([tree, tree], [[4, 5, 6, 8], [4, 0, 0, 0]], max_path=max_path)
    truth = [4, 5, 6, 8, -1]
    length = min(max_path, 3)
    assert got.num_accepted.tolist() == [length, min(max_path, 1)]
    assert got.tokens[0].tolist() == truth[: length + 1] + [-1] * (max_path - length)
    assert got.path[0].tolist() == [1, 2, 3][:length] + [-1] * (max_path - length)


def test_no_trees() -> None:
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    got = tree_walk(none, none, none, none, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    assert got.num_accepted.shape == (0,) and got.path.shape == (0, MAX_PATH)
