"""SpeculationLimits: what a request allows to be drafted; DraftLimits: what a step may draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_NODE_BUDGET = 255  # a tree is at most 256 nodes, root included: four 64-bit ancestor words
DEFAULT_NODE_BUDGET = 16  # where costs say nothing better


@dataclass(frozen=True)
class SpeculationLimits:
    """A request's own limits, below the engine's; None leaves a limit to the engine.

    They change how fast the answer comes, never the answer. `drafters` are names as
    `--drafter` takes them; those that the engine does not have draft nothing.

    Example: `SpeculationLimits(max_nodes=4, drafters=("suffix",))`.
    """

    max_nodes: int | None = None  # 0 = plain decoding
    max_depth: int | None = None
    drafters: tuple[str, ...] | None = None


NO_LIMITS = SpeculationLimits()
NO_SPECULATION = SpeculationLimits(max_nodes=0)


@dataclass(frozen=True)
class DraftLimits:
    """What the controller lets be drafted for one request in the next step.

    `levels` are the drafters to ask and the deepest level each may draft; None asks all of them.
    """

    node_budget: int
    max_depth: int = MAX_NODE_BUDGET
    levels: Mapping[str, int] | None = None


NO_DRAFTS = DraftLimits(0)
