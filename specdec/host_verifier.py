"""HostVerifier: a verdict per decode step, on the host, with every sampling parameter and rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from specdec import noise
from specdec.commit import VerifiedStep
from specdec.config import Verification
from specdec.errors import InvalidRequest
from specdec.kernels.batch import Batch
from specdec.native_sampling import are_finite
from specdec.plan import DecodeStep, StepPlan
from specdec.sampling import NothingToChoose, Sampler
from specdec.tree import DraftTree
from specdec.verification import NO_VERDICT, records, verify


class HostVerifier:
    """Verifies with the Sampler, request by request."""

    def __init__(self, rule: Verification) -> None:
        self._rule: Verification = rule

    def verify(
        self,
        plan: StepPlan,
        trees: Sequence[DraftTree],
        logits: Tensor,
        batch: Batch,
        samplers: Mapping[str, Sampler],
    ) -> list[VerifiedStep]:
        """See Verifier."""
        logits = logits.cpu()
        return [
            self.verify_alone(step, tree, logits[first:last], samplers[step.request.request_id])
            for step, tree, (first, last) in zip(
                plan.decode_steps, trees, pairwise(batch.first_logit), strict=True
            )
        ]

    def verify_alone(
        self, step: DecodeStep, tree: DraftTree, logits: Tensor, sampler: Sampler
    ) -> VerifiedStep:
        """One request's tree. logits: [num_nodes, vocab], on the CPU."""
        if not all(are_finite(noise.native(), logits)):
            return broken_step(step, tree)
        return verify_step(self._rule, step, tree, logits, sampler)

    def warm_up(self, logits: Tensor) -> None:
        """See Verifier; nothing is compiled."""


def verify_step(
    rule: Verification, step: DecodeStep, tree: DraftTree, logits: Tensor, sampler: Sampler
) -> VerifiedStep:
    """Walk one tree on the host. logits: [num_nodes, vocab]."""
    request = step.request
    try:
        verdict = verify(rule, tree, logits, sampler, request.output_ids)
    except NothingToChoose:
        return VerifiedStep(
            step,
            tree,
            NO_VERDICT,
            (),
            "no token is left to choose: allowed_token_ids, bad_words and min_tokens ban them all",
            InvalidRequest.__name__,
        )
    tokens = records(
        verdict, logits, step=request.stats.num_steps, num_logprobs=request.params.logprobs
    )
    return VerifiedStep(step, tree, verdict, tuple(tokens))


def broken_step(step: DecodeStep, tree: DraftTree) -> VerifiedStep:
    """What comes of logits that are not finite."""
    return VerifiedStep(step, tree, NO_VERDICT, (), "logits are not finite")
