"""Verifier: what turns a step's logits into verdicts, and which one serves a rule on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec import noise
from specdec.commit import VerifiedStep
from specdec.config import Verification
from specdec.host_verifier import HostVerifier
from specdec.kernels import dispatch
from specdec.kernels.batch import Batch
from specdec.native_verifier import NativeVerifier
from specdec.plan import StepPlan
from specdec.sampling import Sampler
from specdec.tree import DraftTree


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
        from specdec.device_verifier import DeviceVerifier  # Triton takes a second to import

        return DeviceVerifier()
    library = noise.native()
    if rule == "coupled" and library is not None:
        return NativeVerifier(library)
    return HostVerifier(rule)
