"""Controllers for tests: by cost tables that need not be true, and without any reason."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence

from specdec.adaptive import AdaptiveController
from specdec.controller import Controller, FixedBudget
from specdec.drafting import Drafter
from specdec.limits import DraftLimits
from specdec.plan import StepPlan
from specdec.request import Request
from specdec.step_cost import StepCost
from specdec.tree import DraftTree

CONTROLS = ("fixed", "free rows", "dear rows", "any cost", "whim")


def controller_for(
    control: str, drafter: Drafter | None, node_budget: int, seed: int
) -> Controller | None:
    """The controller of a name in CONTROLS; None leaves it to the engine."""
    if control == "fixed":
        return None
    if control == "whim":
        return WhimsicalController(node_budget, seed)
    draw = random.Random(seed)

    def seconds(num_requests: int, context: int, num_rows: int) -> float:
        if control == "any cost":  # made monotone by the table
            return draw.choice([1e-6, 1e-3, 1e-3, 10.0]) * (1 + num_rows * draw.choice([0, 0, 1]))
        return 1e-3 * (1 + (10.0 if control == "dear rows" else 0.0) * num_rows)

    names = [part.name for part in getattr(drafter, "drafters", [drafter]) if part is not None]
    return AdaptiveController(
        StepCost.of(seconds, max_rows=256, max_requests=8),
        names,
        node_budget=node_budget,
        latency_weight=draw.choice([0.0, 0.5, 1.0]),
        sequential=draw.sample(names, draw.randrange(len(names) + 1)),
    )


class WhimsicalController(FixedBudget):
    """Any limits, and any part of the trees that is a tree."""

    def __init__(self, node_budget: int, seed: int) -> None:
        super().__init__(node_budget)
        self._random = random.Random(seed)

    def limits(self, requests: Iterable[Request]) -> dict[str, DraftLimits]:
        whims = {}
        for name, limits in super().limits(requests).items():
            budget = self._random.randint(0, limits.node_budget)
            whims[name] = dataclasses.replace(limits, node_budget=budget)
        return whims

    def choose(self, plan: StepPlan, candidates: Sequence[DraftTree]) -> list[DraftTree]:
        return [self._part(tree) for tree in super().choose(plan, candidates)]

    def _part(self, tree: DraftTree) -> DraftTree:
        kept = [0]
        for node in range(1, tree.num_nodes):
            if tree.parents[node] in kept and self._random.random() < 0.7:
                kept.append(node)
        return DraftTree.depth_first(
            [tree.token_ids[node] for node in kept],
            [-1, *(kept.index(tree.parents[node]) for node in kept[1:])],
            [tree.scores[node] for node in kept],
            [tree.sources[node] for node in kept],
        )
