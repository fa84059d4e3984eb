"""CompositeDrafter: several drafters as one, joined tree by tree and guarded request by request."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.config import AUTO
from specdec.drafting import DraftContext, Drafter, parse_drafters, suiting_drafters
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree, TreeBuilder
from specdec.verification import Verdict

_log = logging.getLogger(__name__)


class CompositeDrafter(Drafter):
    """Joins its drafters' trees; the engine always drives one, even of a single drafter.

    A drafter that raises, or returns what is not a tree of the step, is disabled for that request
    with a warning; the request goes on with the others. Counts are over the drafter's life:
    `num_faults` by drafter, `seconds` spent in each, and `num_steps` for which each was asked;
    `asked_s` and `num_asked` are of the last draft alone.

    Example: `CompositeDrafter([SuffixDrafter(), MedusaDrafter(heads)], vocab_size=49152)`.
    """

    name = "composite"

    def __init__(self, drafters: Sequence[Drafter], *, vocab_size: int) -> None:
        self.drafters = tuple(drafters)
        self._observers = tuple(d for d in drafters if type(d).observe is not Drafter.observe)
        self.needs_hidden = any(drafter.needs_hidden for drafter in drafters)
        self.num_bytes = sum(drafter.num_bytes for drafter in drafters)
        self.num_faults: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.num_steps: Counter[str] = Counter()
        self.asked_s: defaultdict[str, float] = defaultdict(float)
        self.num_asked: Counter[str] = Counter()
        self._vocab_size = vocab_size
        self._active: dict[str, list[Drafter]] = {}  # by request id

    @classmethod
    def load(cls, context: DraftContext) -> CompositeDrafter:
        """The drafters that `context.config.drafter` names, in that order.

        Of `auto` those that look up come first: where guesses are equal, theirs are named.
        """
        target, config = context.target, context.config
        if config.drafter == AUTO:
            found = [each.load(DraftContext(target, config)) for each in suiting_drafters(target)]
            drafters = sorted(found, key=lambda drafter: drafter.worths is not None)
        else:
            drafters = [
                drafter.load(DraftContext(target, config, checkpoint))
                for drafter, checkpoint in parse_drafters(config.drafter)
            ]
        return cls(drafters, vocab_size=context.target.model.config.vocab_size)

    def admit(self, request: Request) -> None:
        """Tell every drafter that can guess for it."""
        serving = [drafter for drafter in self.drafters if self._serves(drafter, request)]
        self._active[request.request_id] = serving
        for drafter in tuple(serving):
            self._guarded(drafter, request, lambda d=drafter: d.admit(request))  # type: ignore[misc]  # mypy sees no type in a lambda's default

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """Per step all nodes of the drafters that it asks; the controller chooses among them."""
        self.asked_s.clear()
        self.num_asked.clear()
        trees: list[list[DraftTree]] = [[] for _ in steps]
        for drafter in self.drafters:
            asked = [
                index
                for index, step in enumerate(steps)
                if step.node_budget > 0
                and (step.levels is None or drafter.name in step.levels)
                and drafter in self._active[step.request.request_id]
            ]
            if not asked:
                continue
            drafted = self._draft(drafter, [_own_step(drafter, steps[i]) for i in asked])
            for index, tree in zip(asked, drafted, strict=True):
                if tree is not None and tree.num_nodes > 1:
                    trees[index].append(tree)
        return [join(step, own) for step, own in zip(steps, trees, strict=True)]

    def observe(self, request: Request, verdict: Verdict, hidden: Tensor | None) -> None:
        """Tell the drafters that are still active for this request, if they want to be told."""
        for drafter in self._observers:
            if drafter not in self._active[request.request_id]:
                continue
            self._guarded(
                drafter,
                request,
                lambda d=drafter: d.observe(request, verdict, hidden if d.needs_hidden else None),  # type: ignore[misc]  # mypy sees no type in a lambda's default
            )

    def release(self, request: Request) -> None:
        """Tell every drafter that is still active; those that are not were told before."""
        for drafter in self._active.pop(request.request_id):
            try:
                drafter.release(request)
            except Exception as error:
                self._report(drafter, request, error)

    def close(self) -> None:
        """Tell every drafter that the engine ends."""
        for drafter in self.drafters:
            drafter.close()

    def _serves(self, drafter: Drafter, request: Request) -> bool:
        try:
            return drafter.serves(request)
        except Exception as error:
            self._report(drafter, request, error)
            return False

    def _draft(self, drafter: Drafter, steps: Sequence[DecodeStep]) -> list[DraftTree | None]:
        """All steps at once; if that raises, one by one to find out whose fault it is."""
        try:
            return list(self._checked(drafter, steps))
        except Exception as error:
            if len(steps) == 1:
                self._disable(drafter, steps[0].request, error)
                return [None]
        return [self._draft(drafter, [step])[0] for step in steps]

    def _checked(self, drafter: Drafter, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        started = time.perf_counter()
        trees = drafter.draft(steps)
        seconds = time.perf_counter() - started
        self.seconds[drafter.name] += seconds
        self.num_steps[drafter.name] += len(steps)
        self.asked_s[drafter.name] += seconds
        self.num_asked[drafter.name] += len(steps)
        if len(trees) != len(steps):
            raise ValueError(f"{len(trees)} trees for {len(steps)} steps")
        for step, tree in zip(steps, trees, strict=True):
            if tree.token_ids[0] != step.root:
                raise ValueError(f"the tree begins with {tree.token_ids[0]}, not {step.root}")
            if tree.num_nodes - 1 > step.node_budget:
                raise ValueError(f"{tree.num_nodes - 1} nodes; the budget is {step.node_budget}")
            if min(tree.token_ids) < 0 or max(tree.token_ids) >= self._vocab_size:
                raise ValueError(f"a token id is not below {self._vocab_size}")
        return trees

    def _guarded(self, drafter: Drafter, request: Request, call: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            call()
        except Exception as error:
            self._disable(drafter, request, error)
        self.seconds[drafter.name] += time.perf_counter() - started

    def _disable(self, drafter: Drafter, request: Request, error: Exception) -> None:
        self._report(drafter, request, error)
        self._active[request.request_id].remove(drafter)
        try:
            drafter.release(request)
        except Exception:  # its state is broken already
            _log.debug("drafter %s cannot release a request", drafter.name, exc_info=True)

    def _report(self, drafter: Drafter, request: Request, error: Exception) -> None:
        self.num_faults[drafter.name] += 1
        request.stats.disabled_drafters.append(drafter.name)
        _log.warning(
            "drafter %s is disabled for request %s: %s: %s",
            drafter.name,
            request.request_id,
            type(error).__name__,
            error,
            exc_info=_log.isEnabledFor(logging.DEBUG),
        )


def _own_step(drafter: Drafter, step: DecodeStep) -> DecodeStep:
    """The step as one drafter sees it."""
    if step.levels is None:
        return step
    depth = min(step.max_depth, step.levels[drafter.name])
    return DecodeStep(step.request, step.node_budget, depth)


def join(step: DecodeStep, trees: Sequence[DraftTree]) -> DraftTree:
    """All nodes of trees of one root as one tree, in the order in which they were drafted.

    Equal nodes are joined: they keep all sources and the best score.

    Example: `join(step, [])` is the tree of plain decoding.
    """
    if not trees:
        return DraftTree.root_only(step.root)
    if len(trees) == 1:
        return trees[0]
    builder = TreeBuilder(step.root, sum(tree.num_nodes - 1 for tree in trees))
    for tree in trees:
        places = [0]
        for node in range(1, tree.num_nodes):
            place = None
            for source in tree.sources[node]:
                place = builder.add(
                    places[tree.parents[node]], tree.token_ids[node], tree.scores[node], source
                )
            assert place is not None, "there is room for every node"
            places.append(place)
    return builder.build()
