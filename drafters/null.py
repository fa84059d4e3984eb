"""NullDrafter: plain decoding as a drafter."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.drafting import Drafter
from specdec.plan import DecodeStep
from specdec.tree import DraftTree


class NullDrafter(Drafter):
    """Returns trees that are only their root."""

    name = "none"

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """One root-only tree per decode step."""
        return [DraftTree.root_only(step.root) for step in steps]
