"""NullDrafter: plain decoding as a drafter."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree
from specdec.verification import Verdict


class NullDrafter:
    """Returns trees that are only their root."""

    name = "none"

    def admit(self, request: Request) -> None:
        """Nothing to remember."""

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """One root-only tree per decode step."""
        return [DraftTree.root_only(step.root) for step in steps]

    def observe(self, request: Request, verdict: Verdict) -> None:
        """Nothing to learn."""

    def release(self, request: Request) -> None:
        """Nothing to forget."""
