"""Composition: who drafts, and how many nodes at most, where the configuration leaves it open.

A drafter that looks guesses up costs next to nothing, and the adaptive controller asks it only
where that pays. One that was trained costs a pass of its own, so it stays only where what was
measured of it, priced with what steps cost on this machine, pays:

    gain = max over n of (1 + w_1 + ... + w_n) * cost(1 row) / (cost(1 + n rows) + its pass)

with w_i the worth of its i-th best node, how often it is accepted. What a pass is of a forward of
one row is measured once and kept, so that the next start decides as this one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec import machine_cache
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
_KIND = "drafter-pass"


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
    identity: Mapping[str, Any],
    clock: Callable[[], float] = time.perf_counter,
) -> Composition:
    """Settle what is left open: the drafters where `is_open`, the node budget where it is None.

    cost: of steps; None where it is not measured, under fixed control. Then no trained drafter
    stays, and the budget is `DEFAULT_NODE_BUDGET`. identity: all that step costs depend on.
    """
    reasons = []
    kept = list(drafters)
    if is_open:
        gains = {
            drafter.name: gain(
                drafter.worths, cost, _share(drafter, cost, hidden_size, identity, clock)
            )
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


def gain(worths: Sequence[float], cost: StepCost, share: float) -> float:
    """Speed with a drafter's best nodes over plain decoding, at the number of nodes that is best.

    worths: how often each of its best nodes is accepted, greatest first. share: its pass, of a
    forward of one row.
    """
    seconds = cost.forward_s(1, CONTEXT, 1 + len(worths))
    tokens, best = 1.0, 0.0
    for num_nodes, worth in enumerate(worths, start=1):
        tokens += worth
        best = max(best, float(tokens / (seconds[1 + num_nodes] / seconds[1] + share)))
    return best


def _share(
    drafter: Drafter,
    cost: StepCost,
    hidden_size: int,
    identity: Mapping[str, Any],
    clock: Callable[[], float],
) -> float:
    """A drafter's pass, of a forward of one row, as it was measured first."""
    key = {**identity, "drafter": drafter.name, "worths": list(drafter.worths or ())}
    kept = machine_cache.load(_KIND, key)
    if isinstance(kept, float) and 0 < kept < math.inf:
        return kept
    found = pass_s(drafter, hidden_size, clock) / float(cost.forward_s(1, CONTEXT, 1)[1])
    machine_cache.save(_KIND, key, found)
    return found


def pass_s(drafter: Drafter, hidden_size: int, clock: Callable[[], float]) -> float:
    """Seconds that asking a drafter for one request's tree takes: the least of a few times."""
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
    return min(times[1:])  # other load only adds time
