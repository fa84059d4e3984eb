"""RecordedVerifier: verdicts from what the target is known to have said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from torch import Tensor

from specdec.commit import VerifiedStep
from specdec.kernels.batch import Batch
from specdec.plan import DecodeStep, StepPlan
from specdec.request import Request, TokenRecord
from specdec.sampling import Sampler
from specdec.step_record import StepRecord
from specdec.tree import ROOT_SOURCE, DraftTree
from specdec.verification import Verdict


class RecordedVerifier:
    """A `Verifier` that walks each tree along the recorded tokens, as far as they go.

    What the target would have said behind their end nobody knows. A walk that arrives there has no
    bonus token, so its verdict holds one token less than others, and `settle` takes back the guess
    that the step's record could not judge.

    Example: `verifier.expect(request, output_ids)` before the request is added to the engine.
    """

    def __init__(self) -> None:
        self._recorded: dict[str, tuple[int, ...]] = {}
        self._unjudged: dict[str, tuple[tuple[str, ...], ...]] = {}  # sources of the last guesses

    def expect(self, request: Request, output_ids: Sequence[int]) -> None:
        """Know what a request will be answered; more than it asks for tells what is cut off."""
        self._recorded[request.request_id] = tuple(output_ids)

    def settle(self, request: Request) -> tuple[StepRecord, ...]:
        """The records of a request that has ended, which is forgotten."""
        del self._recorded[request.request_id]
        unjudged = self._unjudged.pop(request.request_id, ())
        if unjudged:
            last = request.steps[-1]
            evaluated = Counter(last.evaluated_by)
            evaluated.subtract(chain.from_iterable(unjudged))
            request.steps[-1] = replace(
                last, num_evaluated=last.num_evaluated - 1, evaluated_by=dict(+evaluated)
            )
        return tuple(request.steps)

    def verify(
        self,
        plan: StepPlan,
        trees: Sequence[DraftTree],
        logits: Tensor,
        batch: Batch,
        samplers: Mapping[str, Sampler],
    ) -> list[VerifiedStep]:
        """See Verifier; logits are not read."""
        return [self._walk(step, tree) for step, tree in zip(plan.decode_steps, trees, strict=True)]

    def warm_up(self, logits: Tensor) -> None:
        """See Verifier; there is nothing to make ready."""

    def _walk(self, step: DecodeStep, tree: DraftTree) -> VerifiedStep:
        request = step.request
        num_output = len(request.output)
        recorded = self._recorded[request.request_id]
        coming = recorded[num_output : num_output + tree.num_nodes]
        assert coming, f"{request.request_id} goes on behind the end of what was recorded"
        path = tree.path_of(coming)
        token_ids = coming[: len(path) + 1]
        sources = [tree.sources[node] for node in path]
        if len(token_ids) > len(path):
            sources.append((ROOT_SOURCE,))
        else:
            children = tree.children[path[-1]]
            self._unjudged[request.request_id] = tuple(tree.sources[child] for child in children)
        number = request.stats.num_steps
        records = tuple(
            TokenRecord(token_id, names, depth, number)
            for depth, (token_id, names) in enumerate(zip(token_ids, sources, strict=True), start=1)
        )
        return VerifiedStep(step, tree, Verdict(tuple(path), token_ids, tuple(sources)), records)
