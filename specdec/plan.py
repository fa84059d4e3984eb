"""StepPlan: the frozen statement of one step's work."""

from __future__ import annotations

from dataclasses import dataclass

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

    The last prefill chunk and the first decode step of a request share one step.
    """

    request: Request
    node_budget: int

    @property
    def root(self) -> int:
        """Token id of the root."""
        return self.request.token_ids[-1]


@dataclass(frozen=True)
class StepPlan:
    """Everything one target forward will compute."""

    prefill_chunks: tuple[PrefillChunk, ...]
    decode_steps: tuple[DecodeStep, ...]
    preempted: tuple[Request, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.prefill_chunks and not self.decode_steps
