"""Controller: how much is drafted for each request, and which of its nodes are verified."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from specdec.acceptance import Acceptance
from specdec.commit import VerifiedStep
from specdec.decision import Decision, Reason, StepTimes
from specdec.limits import DraftLimits
from specdec.native_choice import make_chooser
from specdec.plan import StepPlan
from specdec.request import Request
from specdec.tree import DraftTree

NUM_KEPT = 256  # decisions that can be looked at afterwards


class Controller(ABC):
    """Asked twice per step, told once: `limits`, `choose`, `observe`.

    Whatever it decides, the output stays the target's: it only says which guesses are looked at.
    `decisions` holds the last ones, `reasons` counts them all.
    """

    control: str
    """How `--control` calls it."""

    def __init__(self, node_budget: int) -> None:
        self.node_budget = node_budget
        self.acceptance = Acceptance()
        self.decisions: deque[Decision] = deque(maxlen=NUM_KEPT)
        self.reasons: Counter[Reason] = Counter()
        self.num_steps = 0

    @abstractmethod
    def limits(self, requests: Iterable[Request]) -> dict[str, DraftLimits]:
        """What may be drafted in the next step, by request id."""

    @abstractmethod
    def choose(self, plan: StepPlan, candidates: Sequence[DraftTree]) -> list[DraftTree]:
        """The nodes to verify, as one tree per decode step, from all that was drafted.

        Each step's node budget and `plan.node_room` hold.
        """

    @abstractmethod
    def observe(self, verified: Sequence[VerifiedStep], times: StepTimes) -> None:
        """Learn what became of the step that was chosen last."""

    def release(self, request: Request) -> None:
        """Forget a request."""
        self.acceptance.release(request.request_id)

    def explain(self) -> dict[str, Any]:
        """The last decisions and what they rest on, ready for JSON."""
        return {
            "control": self.control,
            "num_steps": self.num_steps,
            "reasons": {reason.value: count for reason, count in self.reasons.most_common()},
            "decisions": [decision.as_json() for decision in self.decisions],
            "calibration": self.acceptance.as_table(),
        }

    def _own_limits(self, request: Request) -> DraftLimits:
        """The engine's node budget within what the request allows."""
        asked = request.speculation
        budget, depth = self.node_budget, DraftLimits.max_depth
        if asked.max_nodes is not None:
            budget = min(budget, asked.max_nodes)
        if asked.max_depth is not None:
            depth = min(depth, asked.max_depth)
        levels = None if asked.drafters is None else dict.fromkeys(asked.drafters, depth)
        return DraftLimits(budget, depth, levels)

    def _decide(self, decision: Decision) -> None:
        self.num_steps += 1
        self.reasons[decision.reason] += 1
        self.decisions.append(decision)

    def _close(self, num_tokens: int, seconds: float) -> None:
        """Enter what came into the last decision."""
        self.decisions[-1] = replace(
            self.decisions[-1], observed_tokens=num_tokens, observed_s=seconds
        )


class FixedBudget(Controller):
    """The same node budget for every request, less where the request itself asks for less.

    Of more nodes than that the likeliest are taken.

    Example: `FixedBudget(16).limits(scheduler.requests)`.
    """

    control = "fixed"

    def __init__(self, node_budget: int) -> None:
        super().__init__(node_budget)
        self._chooser = make_chooser(self.acceptance)
        self._is_estimated = False

    def limits(self, requests: Iterable[Request]) -> dict[str, DraftLimits]:
        """See Controller."""
        return {request.request_id: self._own_limits(request) for request in requests}

    def choose(self, plan: StepPlan, candidates: Sequence[DraftTree]) -> list[DraftTree]:
        """See Controller."""
        started = time.perf_counter()
        steps = plan.decode_steps
        if not steps:
            return []
        num_offered = sum(tree.num_nodes - 1 for tree in candidates)
        trees = list(candidates)
        self._is_estimated = not _fits(plan, trees)
        if self._is_estimated:
            room = num_offered if plan.node_room is None else plan.node_room
            trees = self._chooser.choose(plan, trees, room, stakes=None).trees
        num_nodes = sum(tree.num_nodes - 1 for tree in trees)
        num_rows = num_nodes + len(steps) + plan.num_prefill
        self._decide(
            Decision(
                step=self.num_steps,
                reason=Reason.FIXED,
                num_requests=len(steps),
                num_candidates=num_offered,
                num_nodes=num_nodes,
                num_rows=num_rows,
                predicted_tokens=float(len(steps)),
                predicted_s=0.0,
                plain_s=0.0,
                decide_s=time.perf_counter() - started,
            )
        )
        return trees

    def observe(self, verified: Sequence[VerifiedStep], times: StepTimes) -> None:
        """See Controller."""
        if self._is_estimated:
            self._chooser.observe([item.verdict.token_ids for item in verified])
        if verified:
            self._close(sum(len(item.records) for item in verified), times.total_s)


def _fits(plan: StepPlan, trees: Sequence[DraftTree]) -> bool:
    """Whether everything may be verified as it is."""
    total = 0
    for step, tree in zip(plan.decode_steps, trees, strict=True):
        num_nodes = tree.num_nodes - 1
        if num_nodes > min(step.node_budget, step.max_depth):  # a chain may be that deep
            return False
        total += num_nodes
    return plan.node_room is None or total <= plan.node_room
