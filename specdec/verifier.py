"""HostVerifier: a verdict per decode step, on the host, with every sampling parameter and rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.commit import VerifiedStep
from specdec.config import Verification
from specdec.errors import InvalidRequest
from specdec.kernels import dispatch
from specdec.kernels.batch import Batch
from specdec.plan import DecodeStep, StepPlan
from specdec.sampling import NothingToChoose, Sampler
from specdec.tree import DraftTree
from specdec.verification import NO_VERDICT, records, verify


class Verifier(Protocol):
    """Turns a step's logits into verdicts; a request with broken logits fails alone."""

    def verify(
        self,
        plan: StepPlan,
        trees: Sequence[DraftTree],
        logits: Tensor,
        batch: Batch,
        samplers: Mapping[str, Sampler],
    ) -> list[VerifiedStep]:
        """One verdict per decode step of the plan. samplers: by request id."""

    def warm_up(self, logits: Tensor) -> None:
        """Make ready for logits like these [1, vocab], whatever their values."""


def make_verifier(rule: Verification, device: torch.device) -> Verifier:
    """The verifier of a rule on a device: the coupled rule runs where the logits are."""
    if rule == "coupled" and dispatch.uses_triton(device):
        from specdec.device_verifier import DeviceVerifier

        return DeviceVerifier()
    return HostVerifier(rule)


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
        is_finite = logits.sum(-1, dtype=torch.float32).isfinite().tolist()
        verified = []
        for index, (step, tree) in enumerate(zip(plan.decode_steps, trees, strict=True)):
            first, last = batch.first_logit[index : index + 2]
            if all(is_finite[first:last]):
                sampler = samplers[step.request.request_id]
                verified.append(verify_step(self._rule, step, tree, logits[first:last], sampler))
            else:
                verified.append(broken_step(step, tree))
        return verified

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
