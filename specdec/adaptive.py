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
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from specdec.asking import LEAST_PRICE, Asking, Levels, Prober
from specdec.candidates import Floats
from specdec.choice import Choice, Stakes
from specdec.commit import VerifiedStep
from specdec.controller import Controller
from specdec.decision import Decision, Reason, StepTimes
from specdec.limits import NO_DRAFTS, DraftLimits
from specdec.native_choice import make_chooser
from specdec.plan import DecodeStep, StepPlan
from specdec.request import Request
from specdec.step_cost import StepCost
from specdec.tree import DraftTree

MARGIN = 1.06  # on the price of rows: estimates err, and the best of many errs upwards
SPEED_DECAY = 0.97  # of the running speed-up, per step
NUM_NEW, COST_EVERY = 64, 4  # costs are learned from every step at first, then from some
COSTS_AGE = 16  # times that costs are used once they were read, at most
CONTEXT_BITS, ROW_STEP = 7, 64  # within 128 tokens of context, for multiples of 64 rows

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


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
        exponent = 1.0 - 2.0 * latency_weight
        self._exponent = 0.0 if abs(exponent) < 1e-6 else exponent  # powers lose their digits there
        self._probers = {name: Prober() for name in drafters}
        self._asked: dict[str, dict[str, Asking]] = {}
        self._levels = {name: Levels() for name in sequential}
        self._chooser = make_chooser(self.acceptance, drafters)
        self._load = 0  # requests at once when all drafters were last given a chance
        self._speeds: defaultdict[int, _Speed] = defaultdict(_Speed)  # by load
        self._last = _Step()
        self._known_costs: _Kept[tuple[int, int, int], Floats] = _Kept()
        self._known_asks: _Kept[int, _Asks] = _Kept()  # by number of requests

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
        self._follow_load(num_requests)
        context = sum([step.request.num_tokens for step in steps]) // num_requests
        num_candidates = sum(len(tree.parents) for tree in candidates) - num_requests
        room = num_candidates if plan.node_room is None else min(num_candidates, plan.node_room)
        costs = self._costs(num_requests, context, num_requests + room)
        plain_s = float(costs[num_requests]) + self.cost.rest_s
        price = self._speeds[self._load].up * num_requests / plain_s  # tokens per second
        trees, num_nodes, worth, choice = list(candidates), 0, 0.0, None
        if num_candidates:
            stakes = Stakes(costs, price, MARGIN, self._exponent, self._asks(num_requests).order)
            choice = self._chooser.choose(plan, candidates, room, stakes)
            trees, num_nodes, worth = choice.trees, choice.num_nodes, choice.worth
        self._last = _Step(plan, context, num_nodes, price, plain_s, choice)
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
        self._learn_asking(last, self._chooser.observe(tokens), times)
        num_tokens = sum(len(item.records) for item in verified)
        num_requests, num_prefill = len(verified), last.plan.num_prefill
        self._close(num_tokens, times.total_s)
        if not num_prefill:
            self._speeds[self._load].observe(
                num_tokens, times.total_s * num_requests / last.plain_s
            )
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
            "speed_up": round(self._speeds[self._load].up, 3),
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

    def _follow_load(self, num_requests: int) -> None:
        """Where the load has doubled or halved, what was off may pay now: start afresh."""
        if self._load < 2 * num_requests and num_requests < 2 * self._load:
            return
        self._load = num_requests
        for name, prober in self._probers.items():
            prober.restart()
            for asked in self._asked.values():
                asked[name] = prober.start()

    def _costs(self, num_requests: int, context: int, max_rows: int) -> Floats:
        """Seconds of forwards by rows, for at least as many as asked for."""
        key = (num_requests, context >> CONTEXT_BITS, -(-max_rows // ROW_STEP))
        return self._known_costs.get(
            key, lambda: self.cost.forward_s(num_requests, context, key[2] * ROW_STEP)
        )

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

    def _asks(self, num_requests: int) -> _Asks:
        """What asking costs."""
        return self._known_asks.get(
            num_requests, lambda: _Asks(self.cost, self._drafters, num_requests)
        )

    def _ask_price(self, name: str, asks: _Asks) -> float:
        """Tokens per request that asking a drafter costs, as deep as it was asked last."""
        levels = self._levels.get(name)
        if levels is None:
            seconds = asks.seconds[name]
        else:
            seconds = levels.pass_s * min(self._last.deepest, levels.usual) / asks.num_requests
        return max(LEAST_PRICE, self._last.price * seconds)

    def _learn_asking(
        self, last: _Step, surprises: Sequence[Sequence[str]], times: StepTimes
    ) -> None:
        """What each drafter brought to each request that it was asked for."""
        assert last.plan is not None
        asks = self._asks(len(last.plan.decode_steps))
        prices = {name: self._ask_price(name, asks) for name in self._drafters}
        num_off = dict.fromkeys(self._drafters, 0)
        num_won = dict.fromkeys(self._drafters, 0)
        for index, step in enumerate(last.plan.decode_steps):
            asked = self._asked.get(step.request.request_id)
            if asked is None or not step.node_budget:
                continue
            for place, (name, asking) in enumerate(asked.items()):
                if name not in (step.levels or ()):
                    continue
                value = 0.0 if last.choice is None else float(last.choice.values[index, place])
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
            if num_asked and last.choice is not None:
                levels_of.observe(
                    last.choice.by_level[self._drafters.index(name)] / num_asked,
                    last.deepest,
                    times.draft_s.get(name, 0.0),
                    num_asked,
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


class _Kept(Generic[Key, Value]):
    """Values that drift more and more slowly: one is made anew after it was used once, then after
    twice as many uses each time, up to COSTS_AGE.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, tuple[int, int, Value]] = {}  # uses left, of how many, the value

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of a key, made if there is none or it is too old."""
        left, num_uses, value = self._kept.get(key) or (0, 0, None)
        if value is None or not left:
            if len(self._kept) > COSTS_AGE:
                self._kept.clear()
            left = num_uses = min(max(1, 2 * num_uses), COSTS_AGE)
            value = make()
        self._kept[key] = (left - 1, num_uses, value)
        return value


class _Asks:
    """What asking costs: seconds per request, and the drafters' places, the cheapest first."""

    def __init__(self, cost: StepCost, drafters: Sequence[str], num_requests: int) -> None:
        self.num_requests = num_requests
        self.seconds = {n: cost.ask_s(n, num_requests) / num_requests for n in drafters}
        costs = [cost.ask_s(name, 1) for name in drafters]
        self.order = tuple(sorted(range(len(costs)), key=costs.__getitem__))


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
    choice: Choice | None = None

    @property
    def deepest(self) -> int:
        """The deepest level of its candidates."""
        return 0 if self.choice is None else self.choice.deepest
