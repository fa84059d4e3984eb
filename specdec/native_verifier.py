"""NativeVerifier: the coupled rule on the CPU, one call into C++ per draft tree."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.commit import VerifiedStep
from specdec.host_verifier import HostVerifier, broken_step
from specdec.kernels.batch import Batch
from specdec.plan import DecodeStep, StepPlan
from specdec.request import TokenRecord
from specdec.sampling import Sampler
from specdec.tree import ROOT_SOURCE, DraftTree
from specdec.verification import Verdict, records


class NativeVerifier(HostVerifier):
    """Gives the HostVerifier's verdicts sooner; see native_sampling.py for what it leaves to it.

    Requests whose penalties, bias or bans change their logits are left to it too.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__("coupled")
        self._library = library

    def verify(
        self,
        plan: StepPlan,
        trees: Sequence[DraftTree],
        logits: Tensor,
        batch: Batch,
        samplers: Mapping[str, Sampler],
    ) -> list[VerifiedStep]:
        """See Verifier."""
        stride, inner = logits.stride()
        if logits.dtype is not torch.float32 or inner != 1 or not logits.is_cpu:
            return super().verify(plan, trees, logits, batch, samplers)
        address, vocab_size = logits.data_ptr(), logits.shape[1]
        row_bytes = stride * logits.itemsize
        verified = []
        for index, (step, tree) in enumerate(zip(plan.decode_steps, trees, strict=True)):
            request = step.request
            first, sampler = batch.first_logit[index], samplers[request.request_id]
            num_output = len(request.output)
            walk = None
            if not sampler.changes_logits(num_output):
                walk = sampler.natively(self._library).walk(
                    address + first * row_bytes,
                    stride,
                    vocab_size,
                    tree,
                    len(request.prompt_ids) + num_output,
                )
            if walk is None:
                rows = logits[first : batch.first_logit[index + 1]]
                verified.append(self.verify_alone(step, tree, rows, sampler))
            elif not walk.token_ids:
                verified.append(broken_step(step, tree))
            else:
                sources = (*map(tree.sources.__getitem__, walk.path), (ROOT_SOURCE,))
                verdict = Verdict(walk.path, walk.token_ids, sources)
                tokens = _records(step, verdict, logits, first)
                verified.append(VerifiedStep(step, tree, verdict, tokens))
        return verified


def _records(
    step: DecodeStep, verdict: Verdict, logits: Tensor, first: int
) -> tuple[TokenRecord, ...]:
    """As `records` makes them. logits: of all trees; `first` is this one's first row."""
    number, num_logprobs = step.request.stats.num_steps, step.request.params.logprobs
    if num_logprobs is not None:
        logits = logits[first:]
    return tuple(records(verdict, logits, step=number, num_logprobs=num_logprobs))
