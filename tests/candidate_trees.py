"""Draft trees of any shape, plans and costs for the tests of what is chosen from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from specdec.candidates import Floats
from specdec.params import SamplingParams
from specdec.plan import DecodeStep, StepPlan
from specdec.request import Request
from specdec.tree import ROOT_SOURCE, DraftTree

ONE, TWO, BOTH = ("suffix",), ("medusa",), ("suffix", "medusa")
SCORES = (0.0, 0.05, 0.3, 0.5, 0.5, 0.9, 1.0)
BAD_SCORES = (-1.0, 7.0, float("nan"), float("inf"), float("-inf"))


def tree_of(
    parents: Sequence[int],
    scores: Sequence[float] | None = None,
    sources: Sequence[tuple[str, ...]] | None = None,
    token_ids: Sequence[int] | None = None,
) -> DraftTree:
    """A tree below root 0 with nodes 1, 2, ...; all arguments are of these, without the root."""
    n = len(parents)
    return DraftTree(
        (0, *(token_ids or range(1, n + 1))),
        (-1, *parents),
        (1.0, *(scores or [0.5] * n)),
        ((ROOT_SOURCE,), *(sources or [ONE] * n)),
    )


def chain_of(length: int, score: float = 0.5) -> DraftTree:
    """A chain of one drafter."""
    return tree_of(range(length), [score] * length)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12, scores: Sequence[float] = SCORES) -> DraftTree:
    """Random trees of one drafter or several, chains longer than levels are told apart included."""
    if draw(st.integers(0, 9)) == 9:
        return chain_of(draw(st.integers(1, 4 * max_nodes)), draw(st.sampled_from(scores)))
    n = draw(st.integers(0, max_nodes))
    bushiness = draw(st.integers(1, max_nodes))
    parents = [draw(st.integers(max(0, node - bushiness), node)) for node in range(n)]
    is_joined = draw(st.booleans())
    return tree_of(
        parents,
        draw(st.lists(st.sampled_from(scores), min_size=n, max_size=n)),
        draw(st.lists(st.sampled_from((ONE, TWO, BOTH)), min_size=n, max_size=n))
        if is_joined
        else None,
        draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)),
    )


def request(name: str, temperature: float = 0.0) -> Request:
    """One that has been prompted with little."""
    return Request(name, (1, 2, 3), SamplingParams(temperature=temperature))


def plan_of(*steps: DecodeStep, node_room: int | None = None) -> StepPlan:
    """A plan of decode steps alone."""
    return StepPlan((), steps, (), node_room)


def plain_plan(trees: Sequence[DraftTree]) -> StepPlan:
    """A plan that allows all nodes of these trees, each of a request of its own."""
    return plan_of(*(DecodeStep(request(f"r{i}"), 255) for i in range(len(trees))))


@st.composite
def costs(draw: st.DrawFn, num_rows: int) -> Floats:
    """Non-decreasing seconds [num_rows + 1], with rises of nothing and of much."""
    rises = st.sampled_from((0.0, 0.0, 1e-4, 1e-3, 5e-3)) | st.floats(0.0, 1e-2)
    return 0.01 + np.cumsum(draw(st.lists(rises, min_size=num_rows + 1, max_size=num_rows + 1)))
