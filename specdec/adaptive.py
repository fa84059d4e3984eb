"""AdaptiveController: verifies the nodes that pay, by measured cost and learned acceptance.

A step's time is what all its requests share, so draft nodes of all requests compete in one order,
likeliest first. A token has a price, the time that the engine lately needed for one; nodes are
taken as long as the tokens expected of them are worth the time that they add. Because costs are a
staircase, every number of rows is compared, not only up to the first that loses. That maximises
tokens per second in the long run (the renewal-reward theorem; Dinkelbach 1967 for the ratio).
No node at all is one of the choices, and asking no drafter another: docs/control.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.asking import LEAST_PRICE, NUM_LEVELS, Asking, Levels, Prober
from specdec.candidates import Candidates, Floats
from specdec.commit import VerifiedStep
from specdec.controller import Controller, allowed_worths, best
from specdec.decision import Decision, Reason, StepTimes
from specdec.limits import NO_DRAFTS, DraftLimits
from specdec.plan import DecodeStep, StepPlan
from specdec.request import Request
from specdec.step_cost import StepCost
from specdec.tree import DraftTree

MARGIN = 1.03  # on the price of rows: estimates err, and the best of many errs upwards
SPEED_DECAY = 0.97  # of the running speed-up, per step
LEAST_WORTH = 1e-3
NUM_NEW, COST_EVERY = 256, 3  # costs are learned from every step at first, then from some
COSTS_AGE = 16  # steps for which costs that were read are used
CONTEXT_BITS, ROW_STEP = 7, 64  # within 128 tokens of context, for multiples of 64 rows


class AdaptiveController(Controller):
    """See above. `drafters` are the names that can be asked, `sequential` those of them that take a
    pass of their own for each level.

    `latency_weight` w makes it raise a power mean of the streams' speeds with exponent 1 - 2w: 0
    their sum, the throughput; 1 the harmonic mean, that is, the mean time per token.

    Example: `AdaptiveController(cost, ["suffix", "medusa"], node_budget=16)`.
    """

    control = "adaptive"

    def __init__(
        self,
        cost: StepCost,
        drafters: Sequence[str],
        *,
        node_budget: int,
        latency_weight: float = 0.0,
        sequential: Collection[str] = (),
    ) -> None:
        super().__init__(node_budget)
        self.cost = cost
        self._drafters = tuple(drafters)
        self._sequential = frozenset(sequential)
        self._exponent = 1.0 - 2.0 * latency_weight
        self._probers = {name: Prober() for name in drafters}
        self._asked: dict[str, dict[str, Asking]] = {}
        self._levels = {name: Levels() for name in sequential}
        self._speed = _Speed()
        self._last = _Step()
        self._known_costs: dict[tuple[int, int, int], tuple[int, Floats]] = {}

    def limits(self, requests: Iterable[Request]) -> dict[str, DraftLimits]:
        """See Controller."""
        depths = self._depths()
        return {request.request_id: self._limits(request, depths) for request in requests}

    def choose(self, plan: StepPlan, candidates: Sequence[DraftTree]) -> list[DraftTree]:
        """See Controller."""
        started = time.perf_counter()
        steps = plan.decode_steps
        if not steps:
            self._last = _Step()
            return []
        num_requests = len(steps)
        context = sum(step.request.num_tokens for step in steps) // num_requests
        num_candidates = sum(len(tree.parents) for tree in candidates) - num_requests
        room = num_candidates if plan.node_room is None else min(num_candidates, plan.node_room)
        costs = self._costs(num_requests, context, num_requests + room)
        plain_s = float(costs[num_requests]) + self.cost.rest_s
        price = self._speed.up * num_requests / plain_s  # tokens per second
        trees, worth, values, by_level = list(candidates), 0.0, None, None
        num_nodes = deepest = 0
        if num_candidates:
            flat = Candidates.of(candidates)
            worths = allowed_worths(plan, flat, self.acceptance.estimate(steps, flat))
            num_nodes = self._num_nodes(flat, worths, costs[num_requests:], price, room)
            is_chosen = best(worths, num_nodes)
            trees = flat.pick(is_chosen, worths)
            worth = float(worths[is_chosen].sum())
            row_s = (costs[num_requests + num_nodes] - costs[num_requests]) / max(1, num_nodes)
            values, by_level = self._values(flat, is_chosen, worths - row_s * price)
            deepest = int(flat.depths.max()) if self._levels else 0
        self._last = _Step(plan, context, num_nodes, price, plain_s, values, by_level, deepest)
        self._decide(
            Decision(
                step=self.num_steps,
                reason=self._reason(steps, num_candidates, num_nodes),
                num_requests=num_requests,
                num_candidates=num_candidates,
                num_nodes=num_nodes,
                num_rows=num_requests + num_nodes + plan.num_prefill,
                predicted_tokens=num_requests + worth,
                predicted_s=float(costs[num_requests + num_nodes]) + self.cost.rest_s,
                plain_s=plain_s,
                decide_s=time.perf_counter() - started,
            )
        )
        return trees

    def observe(self, verified: Sequence[VerifiedStep], times: StepTimes) -> None:
        """See Controller."""
        last = self._last
        if last.plan is None:
            return
        tokens = [item.verdict.token_ids for item in verified]
        self._learn_asking(last, self.acceptance.observe(tokens), times)
        num_tokens = sum(len(item.records) for item in verified)
        num_requests, num_prefill = len(verified), last.plan.num_prefill
        self._close(num_tokens, times.total_s)
        if not num_prefill:
            self._speed.observe(num_tokens, times.total_s * num_requests / last.plain_s)
        if self.num_steps < NUM_NEW or self.num_steps % COST_EVERY == 0:
            self.cost.observe(
                num_requests=num_requests,
                context=last.context,
                num_rows=num_requests + last.num_nodes,
                num_prefill=num_prefill,
                times=times,
            )

    def release(self, request: Request) -> None:
        """See Controller."""
        super().release(request)
        self._asked.pop(request.request_id, None)

    def explain(self) -> dict[str, Any]:
        """See Controller."""
        return {
            **super().explain(),
            "speed_up": round(self._speed.up, 3),
            "cost": self.cost.curve(),
            "drafters": [
                {
                    "name": name,
                    "is_on": prober.is_on,
                    "profit": round(prober.profit, 4),
                    "num_asked": prober.num_asked,
                    "num_probes": prober.num_probes,
                    "ask_ms": round(1e3 * self.cost.ask_s(name, 1), 4),
                }
                for name, prober in self._probers.items()
            ],
        }

    def _costs(self, num_requests: int, context: int, max_rows: int) -> Floats:
        """Seconds of forwards by rows; they drift slowly, so they are read anew now and then."""
        key = (num_requests, context >> CONTEXT_BITS, -(-max_rows // ROW_STEP))
        age, costs = self._known_costs.get(key, (COSTS_AGE, None))
        if costs is None or age >= COSTS_AGE:
            if len(self._known_costs) > COSTS_AGE:
                self._known_costs.clear()
            age, costs = 0, self.cost.forward_s(num_requests, context, key[2] * ROW_STEP)
        self._known_costs[key] = (age + 1, costs)
        return costs

    def _limits(self, request: Request, depths: Mapping[str, int]) -> DraftLimits:
        own = self._own_limits(request)
        if own.node_budget == 0:
            return NO_DRAFTS
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = self._asked[request.request_id] = {
                name: prober.start() for name, prober in self._probers.items()
            }
        levels = {
            name: depths.get(name, MAX_DEPTH)
            for name, asking in asked.items()
            if (asking.is_due or self._probers[name].is_due)
            and (own.levels is None or name in own.levels)
        }
        return DraftLimits(own.node_budget, own.max_depth, levels) if levels else NO_DRAFTS

    def _depths(self) -> dict[str, int]:
        """The deepest level of each sequential drafter that pays a pass of it."""
        num_requests = len(self._last.plan.decode_steps) if self._last.plan else 1
        return {
            name: levels.deepest(self._last.price * levels.pass_s, num_requests)
            for name, levels in self._levels.items()
        }

    def _ask_s(self, name: str, num_asked: int) -> float:
        """Seconds of asking a drafter for so many requests, as deep as it was asked last."""
        levels = self._levels.get(name)
        if levels is None:
            return self.cost.ask_s(name, num_asked)
        return levels.pass_s * min(self._last.deepest, levels.usual)

    def _num_nodes(
        self, candidates: Candidates, worths: Floats, costs: Floats, price: float, room: int
    ) -> int:
        """How many nodes to verify. costs: seconds [room + 1] with 0, 1, ... nodes."""
        gains = self._gains(candidates, worths)[:room]
        if not len(gains):
            return 0
        profit = np.cumsum(gains) - MARGIN * price * (costs[1 : len(gains) + 1] - costs[0])
        most = int(np.argmax(profit))
        return most + 1 if profit[most] > 0.0 else 0

    def _gains(self, candidates: Candidates, worths: Floats) -> Floats:
        """What each further node adds to the goal, in tokens, worthiest first."""
        if self._exponent == 1.0:
            return -np.sort(-worths[worths > LEAST_WORTH])
        order = np.lexsort((-worths, candidates.owner))
        order = order[worths[order] > LEAST_WORTH]
        owner = candidates.owner[order]
        total = np.cumsum(worths[order])
        starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
        before = total - worths[order]
        speeds = 1.0 + total - np.repeat(before[starts], np.diff(np.r_[starts, len(owner)]))
        utility = _utility(speeds, self._exponent) - _utility(
            speeds - worths[order], self._exponent
        )
        gains: Floats = -np.sort(-utility)
        return gains

    def _values(
        self, candidates: Candidates, is_chosen: NDArray[np.bool_], profit: Floats
    ) -> tuple[Floats, Floats]:
        """Tokens beyond their price that each drafter's chosen nodes promise.

        A node that several guessed is the cheapest one's: the others need not have been asked.
        Returns these [requests, drafters], and of all requests by level [drafters, NUM_LEVELS].
        """
        values = np.zeros((len(candidates.trees), len(self._drafters)))
        by_level = np.zeros((len(self._drafters), NUM_LEVELS))
        chosen = np.flatnonzero(is_chosen)
        if len(chosen):
            drafters = self.acceptance.cheapest(self._by_cost(), chosen)
            profit = profit.take(chosen)
            np.add.at(values, (candidates.owner.take(chosen), drafters), profit)
            if self._levels:
                depths = np.minimum(candidates.depths.take(chosen), NUM_LEVELS) - 1
                np.add.at(by_level, (drafters, depths), profit)
        return values, by_level

    def _by_cost(self) -> dict[str, tuple[float, int]]:
        return {
            name: (self.cost.ask_s(name, 1), index) for index, name in enumerate(self._drafters)
        }

    def _learn_asking(
        self, last: _Step, surprises: Sequence[Sequence[str]], times: StepTimes
    ) -> None:
        """What each drafter brought to each request that it was asked for."""
        assert last.plan is not None
        num_requests = len(last.plan.decode_steps)
        prices = {
            name: max(LEAST_PRICE, last.price * self._ask_s(name, num_requests) / num_requests)
            for name in self._drafters
        }
        num_off: Counter[str] = Counter()
        num_won: Counter[str] = Counter()
        for index, step in enumerate(last.plan.decode_steps):
            asked = self._asked.get(step.request.request_id)
            if asked is None or not step.node_budget:
                continue
            for place, (name, asking) in enumerate(asked.items()):
                if name not in (step.levels or ()):
                    continue
                value = 0.0 if last.values is None else float(last.values[index, place])
                was_on = asking.is_on
                self._probers[name].observe(value, prices[name], is_probe=not was_on)
                asking.observe(value, prices[name])
                if not was_on:
                    asking.is_curious = bool(surprises) and name in surprises[index]
                    num_off[name] += 1
                    num_won[name] += asking.is_on
        for name, prober in self._probers.items():
            prober.step(num_off=num_off[name], num_won=num_won[name], price=prices[name])
        for name, levels_of in self._levels.items():
            if num_won[name]:
                levels_of.forget()
            num_asked = times.num_asked.get(name, 0)
            if num_asked and last.by_level is not None:
                levels_of.observe(
                    last.by_level[self._drafters.index(name)] / num_asked,
                    last.deepest,
                    times.draft_s.get(name, 0.0),
                )

    def _reason(self, steps: Sequence[DecodeStep], num_candidates: int, num_nodes: int) -> Reason:
        if num_nodes:
            return Reason.SPECULATE if self._is_anyone_on(steps) else Reason.PROBE
        if num_candidates:
            return Reason.NO_GAIN
        if any(step.node_budget for step in steps):
            return Reason.NO_DRAFTS
        if any(step.levels for step in steps):
            return Reason.NO_ROOM
        if any(step.request.request_id in self._asked for step in steps):
            return Reason.OFF
        return Reason.NOT_ALLOWED

    def _is_anyone_on(self, steps: Sequence[DecodeStep]) -> bool:
        for step in steps:
            asked = self._asked.get(step.request.request_id, {})
            if any(asked[name].is_on for name in step.levels or ()):
                return True
        return False


MAX_DEPTH = DraftLimits.max_depth


def _utility(speeds: Floats, exponent: float) -> Floats:
    """Power utility, scaled so that its slope at 1 is 1."""
    if abs(exponent) < 1e-6:
        return np.log(speeds)
    utility: Floats = (speeds**exponent - 1.0) / exponent
    return utility


@dataclass
class _Speed:
    """Tokens per second lately over plain decoding's; never below 1, the choice that is open."""

    tokens: float = 4.0
    plain_tokens: float = 4.0

    def observe(self, tokens: float, plain_tokens: float) -> None:
        """A step brought `tokens`; in its time plain decoding brings `plain_tokens`."""
        self.tokens = SPEED_DECAY * self.tokens + tokens
        self.plain_tokens = SPEED_DECAY * self.plain_tokens + plain_tokens

    @property
    def up(self) -> float:
        return max(1.0, self.tokens / self.plain_tokens)


@dataclass(frozen=True)
class _Step:
    """What the last choice was made of."""

    plan: StepPlan | None = None
    context: int = 0
    num_nodes: int = 0
    price: float = 0.0
    plain_s: float = 1.0
    values: Floats | None = None
    by_level: Floats | None = None
    deepest: int = 0
