"""Control: a controller driven step by step over scripted requests, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec.adaptive import AdaptiveController
from specdec.commit import VerifiedStep
from specdec.controller import Controller
from specdec.decision import Decision, StepTimes
from specdec.limits import DraftLimits, SpeculationLimits
from specdec.params import SamplingParams
from specdec.plan import DecodeStep, PrefillChunk, StepPlan
from specdec.request import Request, TokenRecord
from specdec.step_cost import StepCost
from specdec.tree import ROOT_SOURCE, DraftTree
from specdec.verification import Verdict

PLAIN_S = 0.01
RIGHT, WRONG = 1, 2  # the text is RIGHT for ever; WRONG never comes
Draft = Callable[[DecodeStep], DraftTree]


def cost(row_s: float = 0.0, max_requests: int = 64) -> StepCost:
    """A plain step takes PLAIN_S, each further row `row_s`."""
    return StepCost.of(
        lambda requests, context, rows: PLAIN_S + row_s * (rows - 1),
        max_rows=1024,
        max_requests=max_requests,
    )


def adaptive(
    costs: StepCost, *drafters: str, node_budget: int = 16, **settings: object
) -> AdaptiveController:
    return AdaptiveController(costs, drafters, node_budget=node_budget, **settings)  # type: ignore[arg-type]  # mixed keywords


def chain(
    step: DecodeStep, source: str, length: int, *, right: int = 0, score: float = 0.9
) -> DraftTree:
    """A chain whose first `right` nodes are right."""
    length = min(length, step.node_budget)
    tokens = [RIGHT] * min(right, length) + [WRONG] * max(0, length - right)
    return DraftTree(
        (step.root, *tokens),
        tuple(range(-1, length)),
        (1.0, *[score] * length),
        ((ROOT_SOURCE,), *[(source,)] * length),
    )


@dataclass
class Control:
    """Steps of a controller over requests, all of which decode.

    `drafters` are asked as a step says and joined by nobody: at most one may answer. Asking takes
    `ask_s` by drafter, `level_s` more for each level.
    """

    controller: Controller
    requests: Sequence[Request]
    drafters: Mapping[str, Draft]
    row_s: float = 0.0
    ask_s: Mapping[str, float] = field(default_factory=dict)
    level_s: Mapping[str, float] = field(default_factory=dict)
    node_room: int | None = None
    num_prefill: int = 0
    asked: list[tuple[str, ...]] = field(default_factory=list)  # by step, of any request
    trees: list[DraftTree] = field(default_factory=list)  # of the last step
    limits: dict[str, DraftLimits] = field(default_factory=dict)  # of the last step

    def step(self) -> Decision:
        """One step; what it decided and what came."""
        self.limits = self.controller.limits(self.requests)
        steps = tuple(
            DecodeStep(r, limit.node_budget, limit.max_depth, limit.levels)
            for r in self.requests
            for limit in [self.limits[r.request_id]]
        )
        chunks = (PrefillChunk(request(), 0, self.num_prefill),) if self.num_prefill else ()
        plan = StepPlan(chunks, steps, node_room=self.node_room)
        num_asked: dict[str, int] = {}
        draft_s: dict[str, float] = {}
        candidates = []
        for step in steps:
            tree = DraftTree.root_only(step.root)
            for name, draft in self.drafters.items():
                if step.node_budget and (step.levels is None or name in step.levels):
                    depth = step.max_depth if step.levels is None else step.levels[name]
                    drafted = draft(step)
                    tree = drafted if drafted.num_nodes > 1 else tree
                    num_asked[name] = num_asked.get(name, 0) + 1
                    passes = min(depth, max(drafted.depths))
                    seconds = self.ask_s.get(name, 0.0) + passes * self.level_s.get(name, 0.0)
                    draft_s[name] = draft_s.get(name, 0.0) + seconds
            candidates.append(tree)
        self.asked.append(tuple(num_asked))
        self.trees = self.controller.choose(plan, candidates)
        num_rows = sum(tree.num_nodes for tree in self.trees)
        forward_s = PLAIN_S + self.row_s * (num_rows - 1) + self.num_prefill * 1e-3
        verified = [self._verify(s, tree) for s, tree in zip(steps, self.trees, strict=True)]
        self.controller.observe(verified, StepTimes(forward_s, 0.0, draft_s, num_asked))
        return self.controller.decisions[-1]

    def run(self, num_steps: int) -> list[Decision]:
        return [self.step() for _ in range(num_steps)]

    def _verify(self, step: DecodeStep, tree: DraftTree) -> VerifiedStep:
        path = tree.path_of([RIGHT] * tree.num_nodes)
        tokens = (RIGHT,) * (len(path) + 1)
        sources = (*(tree.sources[node] for node in path), (ROOT_SOURCE,))
        records = tuple(TokenRecord(token, (), 0, 0) for token in tokens)
        step.request.token_ids += tokens
        return VerifiedStep(step, tree, Verdict(tuple(path), tokens, sources), records)


_count = iter(range(10**9))


def request(limits: SpeculationLimits | None = None, *, temperature: float = 0.0) -> Request:
    params = SamplingParams(max_tokens=10**6, temperature=temperature, seed=1)
    return Request(f"r{next(_count)}", (5, 6, 7), params, speculation=limits or SpeculationLimits())
