"""StepPlan: the frozen statement of one step's work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specdec.limits import MAX_NODE_BUDGET
from specdec.request import Request


@dataclass(frozen=True)
class PrefillChunk:
    """Known tokens [start, end) of a request, all before its root, to be computed this step."""

    request: Request
    start: int
    end: int


@dataclass(frozen=True)
class DecodeStep:
    """A request's root and at most `node_budget` draft nodes, to be verified this step.

    `max_depth` is the deepest level that may be drafted, and `levels` the drafters to ask with
    the deepest level of each; None asks all of them. The last prefill chunk and the first decode
    step of a request share one step.
    """

    request: Request
    node_budget: int
    max_depth: int = MAX_NODE_BUDGET
    levels: Mapping[str, int] | None = None

    @property
    def root(self) -> int:
        """Token id of the root."""
        return self.request.token_ids[-1]


@dataclass(frozen=True)
class StepPlan:
    """Everything one target forward will compute.

    `node_room` bounds the draft nodes of all decode steps together: each step's own budget may be
    drafted, and the controller chooses which of those nodes are verified.
    """

    prefill_chunks: tuple[PrefillChunk, ...]
    decode_steps: tuple[DecodeStep, ...]
    preempted: tuple[Request, ...] = ()
    node_room: int | None = None  # None: as much as the budgets allow

    @property
    def is_empty(self) -> bool:
        return not self.prefill_chunks and not self.decode_steps

    @property
    def is_shadow(self) -> bool:
        """Whether all that it computes is for shadows."""
        return all(step.request.is_shadow for step in self.decode_steps) and all(
            chunk.request.is_shadow for chunk in self.prefill_chunks
        )

    @property
    def num_prefill(self) -> int:
        """Query tokens of prefill chunks."""
        return sum(chunk.end - chunk.start for chunk in self.prefill_chunks)
