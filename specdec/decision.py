"""Decision: what the controller chose for one step, why, what it expected and what came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Reason(Enum):
    """Why a step has the draft nodes that it has; every step with a decode counts under one."""

    SPECULATE = "speculate"  # nodes that pay were found
    PROBE = "probe"  # drafted to see whether it would pay again; what pays is verified
    NO_GAIN = "no gain"  # nodes were drafted, and none pays
    OFF = "off"  # not drafted: it has not been paying
    NO_DRAFTS = "no drafts"  # the drafters had no guess
    NO_ROOM = "no room"  # the token budget or the KV cache has no place for nodes
    NOT_ALLOWED = "not allowed"  # the requests or the settings allow none
    FIXED = "fixed"  # a fixed node budget; nothing was weighed


@dataclass(frozen=True)
class StepTimes:
    """Where a step's time went, in seconds.

    `forward_s` reaches from packing to the verdicts, so it holds the device's work without a
    synchronisation of its own; `rest_s` is planning, committing and telling the drafters.
    `draft_s` maps a drafter to its time, `num_asked` to the requests that it drafted for.
    """

    forward_s: float
    rest_s: float
    draft_s: Mapping[str, float]
    num_asked: Mapping[str, int]

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.forward_s + self.rest_s + sum(self.draft_s.values())


@dataclass(frozen=True)
class Decision:
    """One step's decision. Gains are over plain decoding of the same requests: 1.5 = 1.5 times.

    `predicted_tokens` and `predicted_s` are of the chosen nodes, `plain_s` of the step without
    any; `observed_tokens` and `observed_s` are what came of it.

    Example: `decision.predicted_gain` 1.8 with `decision.observed_gain` 0.5: the guesses failed.
    """

    step: int
    reason: Reason
    num_requests: int  # with a decode step
    num_candidates: int  # draft nodes that drafters offered
    num_nodes: int  # of them verified
    num_rows: int  # of the forward, prefill chunks included
    predicted_tokens: float
    predicted_s: float
    plain_s: float
    decide_s: float
    observed_tokens: int = 0
    observed_s: float = 0.0

    @property
    def predicted_gain(self) -> float:
        """Expected tokens per second over plain decoding's."""
        return self._gain(self.predicted_tokens, self.predicted_s)

    @property
    def observed_gain(self) -> float:
        """Tokens per second that came, over what plain decoding is expected to give."""
        return self._gain(self.observed_tokens, self.observed_s)

    def _gain(self, tokens: float, seconds: float) -> float:
        if not (self.num_requests and seconds and self.plain_s):
            return 1.0
        return tokens / seconds / (self.num_requests / self.plain_s)

    def as_json(self) -> dict[str, Any]:
        """All fields and both gains, ready for JSON; None where nothing was weighed."""
        return {
            **asdict(self),
            "reason": self.reason.value,
            "predicted_gain": round(self.predicted_gain, 4) if self.plain_s else None,
            "observed_gain": round(self.observed_gain, 4) if self.plain_s else None,
        }
