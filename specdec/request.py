"""Request: one generation asked for, its tokens, and how far it has come."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from specdec.limits import NO_LIMITS, NO_SPECULATION, SpeculationLimits
from specdec.metrics import SpeculationStats
from specdec.params import SamplingParams
from specdec.step_record import StepRecord
from specdec.text import StopMatcher

FinishReason = Literal["stop", "length", "abort", "error"]


class Phase(Enum):
    """Where a request stands; every accepted request ends FINISHED exactly once."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenRecord:
    """One output token and where it came from.

    `sources` are the drafters whose node carried it, or "target" for the bonus token; `depth` is
    the node's depth in its tree (the bonus token: accepted length + 1); `step` counts the
    request's decode steps. `logprob` and `top_logprobs` (likeliest first) are of the target's own
    distribution before any sampling parameter, and present when the request asked for them.
    """

    token_id: int
    sources: tuple[str, ...]
    depth: int
    step: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RejectedNode:
    """A draft node that was verified and did not become output; fields as in TokenRecord."""

    token_id: int
    sources: tuple[str, ...]
    depth: int
    step: int


@dataclass
class Request:
    """A request's identity, parameters and progress. Only the engine's commit changes progress.

    Ranges, for `num_computed <= num_tokens`:
        [0, num_computed)           tokens whose KV is valid
        [num_computed, num_tokens)  known tokens still to be computed; the last one is the root
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    speculation: SpeculationLimits = NO_LIMITS
    prediction_ids: tuple[int, ...] = ()  # the text that the caller expects back
    keeps_rejected: bool = False  # report rejected nodes too
    keeps_steps: bool = False  # for who measures: `steps` has a record of each decode step
    is_shadow: bool = False  # repeats another: without drafts, not counted, learned from or cached
    stop_matcher: StopMatcher | None = None

    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_kind: str | None = None  # a class of specdec.errors; none: the engine's own fault
    arrival: int = 0  # order of acceptance, set by the scheduler
    num_computed: int = 0
    num_prefix_hit: int = 0
    block_ids: list[int] = field(default_factory=list)
    output: list[TokenRecord] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    steps: list[StepRecord] = field(default_factory=list)
    num_published: int = 0  # full blocks already offered as prefix hits
    max_output: int = field(init=False)  # max_tokens, less where the context ends first
    token_ids: list[int] = field(init=False)
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        if self.is_shadow:
            self.speculation = NO_SPECULATION
        self.max_output = self.params.max_tokens
        self.token_ids = list(self.prompt_ids)
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def output_ids(self) -> list[int]:
        """Output token ids so far."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def is_finished(self) -> bool:
        return self.phase is Phase.FINISHED

    def append(self, record: TokenRecord, eos_token_ids: Sequence[int]) -> None:
        """Take one more output token and decide whether the request ends with it."""
        self.token_ids.append(record.token_id)
        self.output.append(record)
        params = self.params
        is_stop_string = self.stop_matcher is not None and self.stop_matcher.push(record.token_id)
        if len(self.output) >= params.min_tokens and (
            is_stop_string
            or record.token_id in params.stop_token_ids
            or (not params.ignore_eos and record.token_id in eos_token_ids)
        ):
            self.finish("stop")
        elif len(self.output) >= self.max_output:
            self.finish("length")

    def finish(
        self, reason: FinishReason, error: str | None = None, error_kind: str | None = None
    ) -> None:
        """Enter FINISHED; a request finishes once."""
        assert not self.is_finished, f"{self.request_id} finished twice"
        self.phase = Phase.FINISHED
        self.finish_reason = reason
        self.error, self.error_kind = error, error_kind


@dataclass(frozen=True)
class RequestOutput:
    """What a step brought for one request: new tokens, and how it ended if it did."""

    request_id: str
    tokens: tuple[TokenRecord, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: SpeculationStats | None = None  # on the last output
    num_prefix_hit: int = 0
    rejected: tuple[RejectedNode, ...] = ()  # of a request that keeps them
    error_kind: str | None = None
