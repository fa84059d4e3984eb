"""Exchange: one request to a server and what came back, with the time of every arrival."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from specdec.metrics import SpeculationStats

Outcome = Literal["ok", "overloaded", "error"]


@dataclass(frozen=True)
class Arrival:
    """Text or tokens that came at once, `at_s` seconds after the request was sent.

    `num_tokens` are those that came with it, or None where the server does not count as it goes.
    """

    at_s: float
    num_tokens: int | None


@dataclass(frozen=True)
class Exchange:
    """`sent_at` is of `time.perf_counter`; other times are seconds after it.

    `outcome` is overloaded for answers 429 and 503, which a server gives on purpose. Token counts
    are the server's own; 0 where it gave none.
    """

    sent_at: float
    end_s: float
    outcome: Outcome
    status: int = 0  # 0: no answer came
    error: str = ""
    arrivals: tuple[Arrival, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    num_prompt: int = 0
    num_output: int = 0
    num_prefix_hit: int = 0
    token_ids: tuple[int, ...] | None = None  # where they were asked for and given
    stats: SpeculationStats | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def exceeds_context(self) -> bool:
        """Whether the server refused a prompt that is too long for its model's context."""
        return self.status in (400, 413) and "context" in self.error.lower()

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first text or token; None where none came."""
        return self.arrivals[0].at_s if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None of fewer than two tokens."""
        if self.num_output < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1].at_s - self.arrivals[0].at_s) / (self.num_output - 1)

    def itls_s(self) -> list[float] | None:
        """Seconds between successive tokens: k tokens that come t after others are k times t / k.

        What comes with the first tokens has no time of its own, and text without a token, which a
        server had held back, none either. None where the server did not say how many tokens came
        when: chunks are not tokens.

        Example: arrivals of 1, 2 and 1 tokens at 0.1, 0.3 and 0.4 s are [0.1, 0.1, 0.1].
        """
        if any(arrival.num_tokens is None for arrival in self.arrivals):
            return None
        gaps: list[float] = []
        for before, after in pairwise(arrival for arrival in self.arrivals if arrival.num_tokens):
            number = after.num_tokens or 0
            gaps += [(after.at_s - before.at_s) / number] * number
        return gaps
