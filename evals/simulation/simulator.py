"""Simulator: the production controller decides over virtual requests on a virtual machine.

The loop calls the controller as the engine does; drafting, the forward and verification are
replaced by known processes in virtual seconds, so a policy can be tried at batch sizes and on
hardware that are not at hand. Compare policies at equal work: the same seed gives them the same
requests, and phases end after a number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from specdec.commit import VerifiedStep
from specdec.composite import join
from specdec.controller import Controller
from specdec.decision import Reason, StepTimes
from specdec.evals.simulation.population import Phase, Population, VirtualRequest
from specdec.evals.simulation.virtual_machine import VirtualMachine
from specdec.limits import NO_DRAFTS
from specdec.plan import DecodeStep, StepPlan
from specdec.request import TokenRecord
from specdec.tree import DraftTree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
ControllerFactory = Callable[[VirtualMachine, Population], Controller]


@dataclass(frozen=True)
class SimulationResult:
    """What a policy did, step by step; seconds are virtual and without noise.

    All arrays are [num_steps]: tokens kept, seconds, seconds of a plain step of the same
    requests, requests, rows of the forward, draft nodes verified, requests that any drafter was
    asked for, and the index of the population's phase.
    """

    tokens: Ints
    seconds: Floats
    plain_seconds: Floats
    requests: Ints
    rows: Ints
    nodes: Ints
    asked: Ints
    phases: Ints
    reasons: tuple[Reason, ...]

    @property
    def num_steps(self) -> int:
        return len(self.tokens)

    @property
    def throughput(self) -> float:
        """Tokens per virtual second."""
        return self.rate()

    def rate(self, begin: int = 0, end: int | None = None) -> float:
        """Tokens per virtual second of steps [begin, end)."""
        return float(self.tokens[begin:end].sum() / self.seconds[begin:end].sum())

    @property
    def plain_throughput(self) -> float:
        """What plain decoding would give at the same batch sizes and contexts."""
        return float(self.requests.sum() / self.plain_seconds.sum())

    def overhead(self, begin: int = 0, end: int | None = None) -> float:
        """Seconds of steps [begin, end) over those of plain steps for the same requests."""
        return float(self.seconds[begin:end].sum() / self.plain_seconds[begin:end].sum())

    def phase(self, index: int) -> tuple[int, int]:
        """First step of a phase, and the one after its last."""
        begin, end = np.searchsorted(self.phases, (index, index + 1))
        return int(begin), int(end)


def simulate(
    machine: VirtualMachine,
    population: Population,
    make_controller: ControllerFactory,
    *,
    seed: int = 0,
    node_room: int | None = None,
) -> SimulationResult:
    """Serve the population to the end of its last phase.

    `node_room` bounds the draft nodes of a step, as a token budget would.

    Example: `simulate(memory_bound(), chat().at(16, 4000), adaptive()).throughput`.
    """
    return _Simulation(machine, population, make_controller, seed, node_room).run()


@dataclass
class _Record:
    """The arrays of a result in the making."""

    rows_of: list[tuple[float, ...]] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)

    def result(self) -> SimulationResult:
        columns = list(zip(*self.rows_of, strict=True))
        seconds, plain_seconds = (np.array(column) for column in columns[:2])
        counts = (np.array(column, dtype=np.int64) for column in columns[2:])
        tokens, requests, rows, nodes, asked, phases = counts
        return SimulationResult(
            *(tokens, seconds, plain_seconds, requests, rows, nodes, asked, phases),
            tuple(self.reasons),
        )


class _Simulation:
    """One run: the virtual requests in flight, and the controller that decides for them."""

    def __init__(
        self,
        machine: VirtualMachine,
        population: Population,
        make_controller: ControllerFactory,
        seed: int,
        node_room: int | None,
    ) -> None:
        self._machine, self._population, self._seed = machine, population, seed
        self._node_room = node_room
        self._controller = make_controller(machine, population)
        self._running: list[VirtualRequest] = []
        self._num_begun = self._num_tokens = self._num_steps = 0
        self._record = _Record()

    def run(self) -> SimulationResult:
        for index, phase in enumerate(self._population.phases):
            for _ in self._steps(phase):
                self._step(index, phase)
        return self._record.result()

    def _steps(self, phase: Phase) -> Iterator[None]:
        first_step, first_token = self._num_steps, self._num_tokens
        while (
            self._num_steps < first_step + phase.num_steps
            if phase.num_steps is not None
            else self._num_tokens < first_token + (phase.num_tokens or 0)
        ):
            self._admit(phase.concurrency)
            yield

    def _admit(self, concurrency: int) -> None:
        """Begin or abort requests until so many run."""
        while len(self._running) > concurrency:
            self._controller.release(self._running.pop().request)
        while len(self._running) < concurrency:
            self._running.append(VirtualRequest(self._population, self._num_begun, self._seed))
            self._num_begun += 1

    def _step(self, phase_index: int, phase: Phase) -> None:
        """As Engine.step; the forward is a known time, verification a known truth."""
        limits = self._controller.limits([virtual.request for virtual in self._running])
        steps = []
        for virtual in self._running:
            own = limits.get(virtual.request.request_id, NO_DRAFTS)
            steps.append(DecodeStep(virtual.request, own.node_budget, own.max_depth, own.levels))
        plan = StepPlan((), tuple(steps), node_room=self._node_room)
        candidates, draft_s, num_asked = self._draft(steps, phase.usefulness)
        trees = self._controller.choose(plan, candidates)
        num_requests = len(steps)
        context = sum(step.request.num_tokens for step in steps) / num_requests
        verified = [
            _verified(virtual, step, tree)
            for virtual, step, tree in zip(self._running, steps, trees, strict=True)
        ]
        num_nodes = sum(tree.num_nodes - 1 for tree in trees)
        sizes = (num_requests, context, num_requests + num_nodes)
        machine, before = self._machine, self._num_tokens
        forward_s = machine.forward_s(*sizes, before)
        seconds = forward_s + machine.rest_s + sum(draft_s.values())
        plain_s = machine.forward_s(num_requests, context, num_requests, before) + machine.rest_s
        for item in verified:
            for record in item.records:
                item.step.request.append(record, ())
                self._num_tokens += 1
                if item.step.request.is_finished:
                    break
            item.step.request.num_computed = item.step.request.num_tokens - 1
        for virtual in self._running:
            if virtual.request.is_finished:
                self._controller.release(virtual.request)
        self._running = [virtual for virtual in self._running if not virtual.request.is_finished]
        noise = machine.noise.factor(self._seed, self._num_steps)
        self._controller.observe(
            verified,
            StepTimes(
                forward_s * noise,
                machine.rest_s * noise,
                {name: noise * value for name, value in draft_s.items()},
                num_asked,
            ),
        )
        self._num_steps += 1
        self._record.reasons.append(self._controller.decisions[-1].reason)
        self._record.rows_of.append(
            (
                *(seconds, plain_s, self._num_tokens - before, num_requests, sizes[2]),
                *(num_nodes, max(num_asked.values(), default=0), phase_index),
            )
        )

    def _draft(
        self, steps: Sequence[DecodeStep], usefulness: float
    ) -> tuple[list[DraftTree], dict[str, float], dict[str, int]]:
        """The joined trees; seconds and requests of each drafter that was asked."""
        trees: list[list[DraftTree]] = [[] for _ in steps]
        draft_s: dict[str, float] = {}
        num_asked: dict[str, int] = {}
        for number, drafter in enumerate(self._population.drafters):
            name, deepest, count = drafter.name, 0, 0
            for own, virtual, step in zip(trees, self._running, steps, strict=True):
                if step.node_budget <= 0 or (step.levels is not None and name not in step.levels):
                    continue
                depth = min(step.max_depth, drafter.max_depth)
                if step.levels is not None:
                    depth = min(depth, step.levels[name])
                count += 1
                deepest = max(deepest, min(depth, step.node_budget))
                tree = virtual.draft(number, depth, step.node_budget, usefulness)
                if tree.num_nodes > 1:
                    own.append(tree)
            if count:
                num_asked[name] = count
                draft_s[name] = drafter.seconds(count, deepest)
        return [join(step, own) for step, own in zip(steps, trees, strict=True)], draft_s, num_asked


def _verified(virtual: VirtualRequest, step: DecodeStep, tree: DraftTree) -> VerifiedStep:
    verdict = virtual.verify(tree)
    records = [
        _record_of(token_id, sources, depth, 0)
        for depth, (token_id, sources) in enumerate(
            zip(verdict.token_ids, verdict.sources, strict=True), start=1
        )
    ]
    return VerifiedStep(step, tree, verdict, tuple(records))


_record_of = lru_cache(2**16)(TokenRecord)  # equal ones come again and again
