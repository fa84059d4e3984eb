"""Choice: which draft nodes of a step are verified, for what they are worth and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from specdec.acceptance import Acceptance
from specdec.asking import NUM_LEVELS
from specdec.candidates import Bools, Candidates, Floats, Ints
from specdec.counts import MAX_SOURCES
from specdec.plan import StepPlan
from specdec.tree import DraftTree

LEAST_WORTH = 1e-3
_TINY = float(np.finfo(np.float64).tiny)


class Stakes(NamedTuple):
    """What is weighed: tokens against seconds.

    `costs` are seconds of a forward by its rows, roots and nodes; `price` is what a second is worth
    in tokens, `margin` a factor on it that nodes must pay. The streams' speeds are raised to
    `exponent` before they are added up (0: their logarithms). `cheapest_first` orders the drafters,
    by their index, by what asking them costs.
    """

    costs: Floats
    price: float
    margin: float = 1.0
    exponent: float = 1.0
    cheapest_first: tuple[int, ...] = ()


class Choice(NamedTuple):
    """What is verified. The arrays hold until the next choice.

    `trees` are the chosen nodes by request, `num_nodes` their number without roots, `worth` the
    tokens expected of them. `values` [requests, drafters] are tokens beyond their rows' price that
    each drafter's chosen nodes promise, and `by_level` [drafters, NUM_LEVELS] those of all requests
    by depth; a node that several guessed is the cheapest one's, for the others need not have been
    asked. `deepest` is the deepest level of any candidate.
    """

    trees: list[DraftTree]
    num_nodes: int
    worth: float
    values: Floats
    by_level: Floats
    deepest: int


class Chooser:
    """Chooses nodes by the estimates of `acceptance`, which learns from what became of them.

    `drafters` are those whose values are told apart. This is how it is specified, in numpy;
    specdec/native_choice.py does the same in a small part of the time.

    Example:
        choice = Chooser(acceptance, ["suffix"]).choose(plan, trees, 16, Stakes(costs, price=110.0))
        chooser.observe([verdict.token_ids for verdict in verdicts])
    """

    def __init__(self, acceptance: Acceptance, drafters: Sequence[str] = ()) -> None:
        self.acceptance = acceptance
        self._drafters = tuple(drafters)
        self._cheapest = np.zeros(MAX_SOURCES, dtype=np.int32)  # drafter by source
        self._cheapest_of: tuple[tuple[int, ...], int] = ((), 0)

    def choose(
        self, plan: StepPlan, trees: Sequence[DraftTree], room: int, stakes: Stakes | None
    ) -> Choice:
        """The nodes that pay, at most `room`; the `room` likeliest where nothing is at stake."""
        candidates = Candidates.of(trees)
        expected = self.acceptance.estimate(plan.decode_steps, candidates)
        worths = allowed_worths(plan, candidates, expected)
        gains, num_nodes = worths, room
        if stakes is not None:
            costs = stakes.costs[len(trees) :]
            gains = find_gains(candidates, worths, stakes.exponent)
            num_nodes = count_paying(gains, room, costs, stakes.margin * stakes.price)
            self._find_cheapest(stakes.cheapest_first)
        is_chosen = best(gains, num_nodes)
        chosen = np.flatnonzero(is_chosen)
        values = np.zeros((len(trees), len(self._drafters)))
        by_level = np.zeros((len(self._drafters), NUM_LEVELS))
        if self._drafters:
            owner = candidates.owner[chosen]
            profit = worths[chosen]
            if stakes is not None:
                profit = profit - row_prices(owner, len(trees), costs, stakes.price)[owner]
            drafters = self._cheapest[self.acceptance.last_sources[chosen]]
            depths = np.minimum(candidates.depths[chosen], NUM_LEVELS) - 1
            np.add.at(values, (owner, drafters), profit)
            np.add.at(by_level, (drafters, depths), profit)
        return Choice(
            trees=candidates.pick(is_chosen, worths),
            num_nodes=len(chosen),
            worth=float(np.cumsum(worths[chosen])[-1]) if len(chosen) else 0.0,
            values=values,
            by_level=by_level,
            deepest=int(candidates.depths.max()),
        )

    def observe(self, tokens: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
        """See Acceptance.observe; the last estimate is the last choice's."""
        return self.acceptance.observe(tokens)

    def _find_cheapest(self, cheapest_first: tuple[int, ...]) -> None:
        """For each source the cheapest drafter among those that it names, 0 if it is unknown."""
        source_ids = self.acceptance.source_ids
        if self._cheapest_of == (cheapest_first, len(source_ids)):
            return
        self._cheapest_of = cheapest_first, len(source_ids)
        for names, source in source_ids.items():
            known = (index for index in cheapest_first if self._drafters[index] in names)
            self._cheapest[source] = next(known, 0)


def allowed_worths(plan: StepPlan, candidates: Candidates, expected: Floats) -> Floats:
    """P(accepted) of each node [N]; 0 where it must not be verified, for roots too.

    Nodes that are too deep are out, and those beyond the best `node_budget` of a step.
    """
    worths = candidates.along_paths(expected)
    worths[candidates.first[:-1]] = 0.0
    bounds = candidates.first.tolist()
    for index, step in enumerate(plan.decode_steps):
        own = worths[bounds[index] : bounds[index + 1]]
        if step.max_depth < len(own) - 1:
            own[candidates.depths[bounds[index] : bounds[index + 1]] > step.max_depth] = 0.0
        if len(own) - 1 > step.node_budget:
            own[~best(own, step.node_budget)] = 0.0
    return worths


def best(gains: Floats, count: int) -> Bools:
    """Whether each node is among the best `count`; of equal ones the first drafted are.

    A node is worth less than its parent, so with it its parent is taken too.
    """
    if count <= 0:
        return np.zeros(len(gains), dtype=bool)
    least = float(np.sort(gains)[-min(count, len(gains))])
    is_taken: Bools = gains >= max(least, _TINY)
    surplus = int(np.count_nonzero(is_taken)) - count
    if surplus > 0:
        is_taken[np.flatnonzero(gains == least)[-surplus:]] = False
    return is_taken


def find_gains(candidates: Candidates, worths: Floats, exponent: float) -> Floats:
    """What each node adds to the goal, in tokens, the worthier ones of its tree being there. [N]"""
    gains = np.where(worths > LEAST_WORTH, worths, 0.0)
    if exponent == 1.0:
        return gains
    for start, end in pairwise(candidates.first.tolist()):
        own = gains[start:end]
        order = np.argsort(-own, kind="stable")[: np.count_nonzero(own)]
        speeds = 1.0 + np.cumsum(own[order])
        before, after = (_utilities(x, exponent) for x in (speeds - own[order], speeds))
        own[order] = np.array(after) - np.array(before)
    return gains


def count_paying(gains: Floats, room: int, costs: Floats, price: float) -> int:
    """How many nodes to verify. costs: seconds with 0, 1, ... nodes."""
    likeliest = -np.sort(-gains[gains > 0.0])[:room]
    if not len(likeliest):
        return 0
    profit = np.cumsum(likeliest) - price * (costs[1 : len(likeliest) + 1] - costs[0])
    most = int(np.argmax(profit))
    return most + 1 if profit[most] > 0.0 else 0


def row_prices(owner: Ints, num_trees: int, costs: Floats, price: float) -> Floats:
    """What a row of each tree costs, in tokens: the time that leaving them out saves. [trees]

    owner: the tree of each chosen node. Where rows grow cheaper, that is less than the mean.
    """
    counts = np.bincount(owner, minlength=num_trees)
    saved: Floats = costs[len(owner)] - costs[len(owner) - counts]
    return saved / np.maximum(1, counts) * price


def _utilities(speeds: Floats, exponent: float) -> list[float]:
    """Power utility, scaled so that its slope at 1 is 1. By `math`, for numpy rounds otherwise."""
    if exponent == 0.0:
        return [math.log(speed) for speed in speeds.tolist()]
    return [(math.pow(speed, exponent) - 1.0) / exponent for speed in speeds.tolist()]
