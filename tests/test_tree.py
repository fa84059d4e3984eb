"""DraftTree: shape, merging of paths, and ancestor masks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.tree import ROOT_SOURCE, DraftTree, TreeBuilder


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    size = draw(st.sampled_from([1, 2, 9, 63, 64, 65, 130, 256]))
    reach = draw(st.sampled_from([1, 3, 256]))  # 1 = a chain
    return [-1] + [draw(st.integers(max(0, i - reach), i - 1)) for i in range(1, size)]


def tree_of(parents: list[int]) -> DraftTree:
    n = len(parents)
    return DraftTree(tuple(range(n)), tuple(parents), (0.0,) * n, (("x",),) * n)


@given(parent_lists())
def test_shape_equals_a_naive_walk(parents: list[int]) -> None:
    tree = tree_of(parents)
    assert len(tree.ancestors) == len(parents)
    for node in range(len(parents)):
        walk = [node]
        while parents[walk[-1]] >= 0:
            walk.append(parents[walk[-1]])
        assert tree.depths[node] == len(walk) - 1
        assert tree.path(node) == tuple(reversed(walk))
        assert tree.children[node] == tuple(c for c, p in enumerate(parents) if p == node)
        mask = tree.ancestors[node]
        assert [j for j in range(len(parents)) if mask >> j & 1] == sorted(walk)
        assert mask >> len(parents) == 0
    assert tree.is_chain == (max(tree.depths) == len(parents) - 1)


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=5),
    st.lists(st.integers(0, 2), max_size=6),
)
def test_a_path_is_followed_by_its_tokens_as_far_as_there_are_nodes(
    paths: list[list[int]], token_ids: list[int]
) -> None:
    tree = DraftTree.from_paths(7, paths, source="toy", node_budget=30)
    nodes = [0]
    for token_id in token_ids:
        fitting = [c for c in tree.children[nodes[-1]] if tree.token_ids[c] == token_id]
        if not fitting:
            break
        nodes += fitting
    assert tree.path_of(token_ids) == nodes[1:]


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=5),
    st.integers(0, 12),
)
def test_from_paths_holds_the_paths_as_far_as_the_budget_goes(
    paths: list[list[int]], node_budget: int
) -> None:
    tree = DraftTree.from_paths(7, paths, source="toy", node_budget=node_budget)
    wanted = list(dict.fromkeys(tuple(p[:n]) for p in paths for n in range(1, len(p) + 1)))
    got = [tuple(tree.token_ids[n] for n in tree.path(i)[1:]) for i in range(1, tree.num_nodes)]
    assert len(got) == min(node_budget, len(wanted))
    assert len(set(got)) == len(got)  # prefixes are shared
    if node_budget >= len(wanted):
        assert got == wanted
    assert set(got) <= set(wanted)
    assert tree.token_ids[0] == 7 and tree.sources[0] == (ROOT_SOURCE,)
    assert set(tree.sources[1:]) <= {("toy",)}


def test_earlier_paths_win_and_stay_contiguous() -> None:
    tree = DraftTree.from_paths(5, [[7, 8], [9], [7, 6]], source="toy", node_budget=3)
    assert tree.token_ids == (5, 7, 8, 9)
    assert tree.parents == (-1, 0, 1, 0)
    assert tree.scores[1] == tree.scores[2] > tree.scores[3]
    assert not tree.is_chain


def test_child_with() -> None:
    tree = DraftTree.from_paths(5, [[7, 8], [9, 7]], source="toy", node_budget=9)
    assert tree.child_with(0, 7) == 1
    assert tree.child_with(0, 9) == 3
    assert tree.child_with(3, 7) == 4
    assert tree.child_with(0, 8) is None  # a grandchild
    assert tree.child_with(2, 7) is None


def test_builder_reuses_children_even_without_room() -> None:
    builder = TreeBuilder(5, 1)
    assert builder.add(0, 7, 0.5, "a") == 1
    assert builder.room == 0
    assert builder.add(0, 7, 0.9, "b") == 1
    assert builder.add(0, 8, 0.9, "b") is None
    tree = builder.build()
    assert tree.scores == (1.0, 0.9) and tree.sources == ((ROOT_SOURCE,), ("a", "b"))


def test_root_only() -> None:
    tree = DraftTree.root_only(5)
    assert tree.num_nodes == 1 and tree.is_chain and tree.depths == (0,)
    assert tree.ancestors == (1,)


@pytest.mark.parametrize("parents", [(), (0,), (-1, -1), (-1, 1), (-1, 2, 0), (-1, 0, 2)], ids=str)
def test_parents_come_before_children(parents: tuple[int, ...]) -> None:
    n = len(parents)
    with pytest.raises(AssertionError):
        DraftTree((0,) * n, parents, (0.0,) * n, (("x",),) * n)
    with pytest.raises(AssertionError):
        DraftTree((0, 1), (-1, 0), (0.0,), (("x",),) * 2)
