"""Growth: the worthiest nodes of all that could be guessed, likeliest path first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafters.growth import Growth
from specdec.tree import DraftTree

Path = tuple[int, ...]
ROOT, UNBOUNDED = 99, 10**6

# What a drafter would guess: scores of the children, likeliest first, by depth and parent token.
# Eighths meet exactly, so that ties occur; a certain child is worth as much as its parent.
scores = st.one_of(st.sampled_from([0.125, 0.25, 0.5, 1.0]), st.floats(0.01, 1.0))
families = st.lists(scores, max_size=3).map(lambda own: sorted(own, reverse=True))
guessers = st.lists(st.tuples(families, families, families), min_size=1, max_size=4)
Guesser = list[tuple[list[float], list[float], list[float]]]


def children(guesser: Guesser, path: Path) -> list[float]:
    """Scores of the tokens 0, 1, ... below a path."""
    if len(path) == len(guesser):
        return []
    return guesser[len(path)][path[-1] if path else 0]


def grown(guesser: Guesser, node_budget: int, width: int = UNBOUNDED) -> Growth:
    growth = Growth(ROOT, node_budget)
    paths: dict[int, Path] = {0: ()}
    for _ in range(len(guesser)):
        for node in growth.frontier(width):
            first = len(growth.token_ids)
            own = children(guesser, paths[node])
            growth.extend(node, range(len(own)), own)
            for child in range(first, len(growth.token_ids)):
                paths[child] = (*paths[node], growth.token_ids[child])
    return growth


def all_worths(guesser: Guesser) -> dict[Path, float]:
    """The oracle: every path that could be guessed, multiplied out from the root."""
    found: dict[Path, float] = {(): 1.0}
    level: list[Path] = [()]
    while level:
        below = []
        for path in level:
            for token_id, score in enumerate(children(guesser, path)):
                below.append((*path, token_id))
                found[below[-1]] = found[path] * score
        level = below
    return found


def worths(tree: DraftTree) -> dict[Path, float]:
    found: dict[Path, float] = {}
    for node in range(tree.num_nodes):
        path = tree.path(node)
        worth = 1.0
        for step in path[1:]:
            worth *= tree.scores[step]
        found[tuple(tree.token_ids[step] for step in path[1:])] = worth
    return found


@settings(deadline=None)
@given(guessers, st.integers(1, 20))
def test_the_tree_holds_the_worthiest_nodes(guesser: Guesser, node_budget: int) -> None:
    everything = all_worths(guesser)
    tree = grown(guesser, node_budget).tree("toy")
    got = worths(tree)
    assert len(got) == tree.num_nodes  # no path twice
    assert all(everything[path] == worth for path, worth in got.items())
    best = sorted((worth for path, worth in everything.items() if path), reverse=True)
    assert sorted((w for path, w in got.items() if path), reverse=True) == best[:node_budget]
    assert tree.token_ids[0] == ROOT and set(tree.sources[1:]) <= {("toy",)}


@settings(deadline=None)
@given(guessers, st.integers(1, 20), st.integers(1, 3))
def test_the_likeliest_path_is_laid_first(guesser: Guesser, node_budget: int, width: int) -> None:
    tree = grown(guesser, node_budget, width).tree("toy")
    assert tree.num_nodes <= node_budget + 1
    for node, below in enumerate(tree.children):
        own = [tree.scores[child] for child in below]
        assert own == sorted(own, reverse=True)
        if below:  # depth first: what follows a node is the likeliest below it
            assert below[0] == node + 1


@pytest.mark.parametrize("node_budget", [1, 2, 3, 9])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_narrow_frontier_takes_the_worthiest(node_budget: int, width: int) -> None:
    growth = Growth(ROOT, node_budget)
    growth.extend(growth.frontier(width)[0], [0, 1, 2], [0.5, 0.3, 0.2])
    alive = [node for node in (1, 2, 3)[:node_budget] if growth.worths[node] > growth.least_worth]
    taken = growth.frontier(width, at_least=0.25)
    assert taken == [node for node in alive if growth.worths[node] > 0.25][:width]
    assert growth.frontier(width) == []  # a level has children once


@settings(deadline=None)
@given(guessers, st.integers(1, 20), st.data())
def test_nodes_come_with_all_that_is_above_them(
    guesser: Guesser, node_budget: int, data: st.DataObject
) -> None:
    growth = grown(guesser, node_budget)
    every = range(len(growth.token_ids))
    nodes = data.draw(st.lists(st.sampled_from(every), unique=True))
    rows, masks = growth.with_ancestors(nodes)

    def above(node: int) -> set[int]:
        return {0} if node == 0 else {node} | above(growth.parents[node])

    assert rows == sorted({0}.union(*(above(node) for node in nodes)))
    for place, (node, mask) in enumerate(zip(rows, masks, strict=True)):
        assert {rows[bit] for bit in range(place + 1) if mask >> bit & 1} == above(node)
        assert mask >> place == 1


def test_the_example_of_the_class() -> None:
    growth = Growth(root=5, node_budget=4)
    growth.extend(growth.frontier(width=1)[0], [7, 8], [0.6, 0.3])
    growth.extend(growth.frontier(width=1)[0], [9], [0.5])
    assert growth.parents == [-1, 0, 0, 1]
    assert growth.tree("medusa").token_ids == (5, 7, 9, 8)
    assert growth.depths == [0, 1, 1, 2]


def test_nodes_that_do_not_count_are_never_added() -> None:
    growth = Growth(root=5, node_budget=2)
    growth.extend(growth.frontier(UNBOUNDED)[0], [7, 8, 9], [0.5, 0.25, 0.25])
    assert growth.token_ids == [5, 7, 8] and growth.least_worth == pytest.approx(0.25)
    assert growth.frontier(UNBOUNDED) == [1]  # what is below 8 would be worth less than 8
    growth.extend(1, [3, 4], [0.75, 0.5])
    assert growth.tree("toy").token_ids == (5, 7, 3)
