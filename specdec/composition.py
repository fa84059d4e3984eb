"""Composition: who drafts, and how many nodes at most, where the configuration leaves it open.

A drafter that looks guesses up costs next to nothing, and the adaptive controller asks it only
where that pays. One that was trained costs a pass of its own, so it stays only where what was
measured of it, priced with what steps cost on this machine, pays:

    gain = max over n of (1 + w_1 + ... + w_n) * cost(1 row) / (cost(1 + n rows) + its pass)

with w_i the worth of its i-th best node, how often it is accepted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.adaptive import MARGIN
from specdec.drafting import Drafter
from specdec.limits import DEFAULT_NODE_BUDGET, MAX_NODE_BUDGET
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.step_cost import StepCost
from specdec.verification import Verdict

BUDGETS = tuple(2**power for power in range(2, MAX_NODE_BUDGET.bit_length()))
CONTEXT = 512  # tokens of a chat
SURE = 0.95  # acceptance of a text that is handed over and changed in one token of twenty
_REPEATS = 5


@dataclass(frozen=True)
class Composition:
    """Who drafts, the node budget, and why, in words; "" where nothing was left open.

    Example: `Composition((SuffixDrafter(),), 8, "drafter suffix; at most 8 nodes a step")`.
    """

    drafters: tuple[Drafter, ...]
    node_budget: int
    reason: str

    @property
    def names(self) -> str:
        """As `--drafter` takes them."""
        return ",".join(drafter.name for drafter in self.drafters)


def compose(
    drafters: Sequence[Drafter],
    cost: StepCost | None,
    *,
    hidden_size: int,
    is_open: bool,
    node_budget: int | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Composition:
    """Settle what is left open: the drafters where `is_open`, the node budget where it is None.

    cost: of steps; None where it is not measured, under fixed control. Then no trained drafter
    stays, and the budget is `DEFAULT_NODE_BUDGET`.
    """
    reasons = []
    kept = list(drafters)
    if is_open:
        gains = {
            drafter.name: gain(drafter.worths, cost, pass_s(drafter, hidden_size, clock))
            for drafter in drafters
            if drafter.worths is not None and cost is not None
        }
        kept = [d for d in drafters if d.worths is None or gains.get(d.name, 0.0) >= MARGIN]
        told = [
            f"{name} would give {times:.2f}x" if times < MARGIN else f"{name} gives {times:.2f}x"
            for name, times in gains.items()
        ]
        names = ",".join(drafter.name for drafter in kept)
        reasons.append(f"drafter {names}" + "".join(f", {words}" for words in told))
    if node_budget is None:
        node_budget = DEFAULT_NODE_BUDGET if cost is None else best_budget(cost)
        reasons.append(f"at most {node_budget} nodes a step")
    return Composition(tuple(kept), node_budget, "; ".join(reasons))


def best_budget(cost: StepCost) -> int:
    """The node budget that is best for guesses that nearly all come true; worse ones use less.

    Of a chain of n nodes accepted with probability p each, 1 + p + ... + p^n tokens are expected.

    Example: with rows that cost nothing it is the greatest of `BUDGETS`.
    """
    seconds = cost.forward_s(1, CONTEXT, 1 + BUDGETS[-1])

    def speed(num_nodes: int) -> float:
        tokens = (1 - SURE ** (num_nodes + 1)) / (1 - SURE)
        return float(tokens / (seconds[1 + num_nodes] + cost.rest_s))

    return int(max(BUDGETS, key=speed))


def gain(worths: Sequence[float], cost: StepCost, own_s: float) -> float:
    """Speed with a drafter's best nodes over plain decoding, at the number of nodes that is best.

    worths: how often each of its best nodes is accepted, greatest first. own_s: its pass, seconds.
    """
    seconds = cost.forward_s(1, CONTEXT, 1 + len(worths))
    tokens, best = 1.0, 0.0
    for num_nodes, worth in enumerate(worths, start=1):
        tokens += worth
        best = max(best, float(tokens * seconds[1] / (seconds[1 + num_nodes] + own_s)))
    return best


def pass_s(drafter: Drafter, hidden_size: int, clock: Callable[[], float]) -> float:
    """Seconds that asking a drafter for one request's tree takes: the median of a few times."""
    request = Request("rehearsal", tuple(range(8)), SamplingParams(seed=0))
    drafter.admit(request)
    hidden = torch.ones(1, hidden_size) if drafter.needs_hidden else None
    drafter.observe(request, Verdict((), (0,), (("",),)), hidden)
    times = []
    for _ in range(1 + _REPEATS):
        started = clock()
        drafter.draft([DecodeStep(request, DEFAULT_NODE_BUDGET)])
        times.append(clock() - started)
    drafter.release(request)
    return statistics.median(times[1:])
