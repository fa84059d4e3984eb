"""SpeculationStats: the small accumulator behind every acceptance figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

Sources = tuple[str, ...]  # of one node: the drafters that guessed it


@dataclass
class SpeculationStats:
    """Counts over the decode steps of one request, or summed over many.

    Each decode step is one target forward that yielded tokens; steps without draft nodes count
    too, with accepted length 0. What was cut by a stop or a limit counts as not accepted.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    deepest: int = 0  # of all draft nodes
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    disabled_drafters: list[str] = field(default_factory=list)  # they raised; see the log

    def observe_step(
        self,
        draft_sources: Sequence[Sources],
        accepted_sources: Sequence[Sources],
        *,
        deepest: int = 0,
    ) -> None:
        """Count one decode step by the sources of its draft nodes and of the accepted ones.

        A node that several drafters guessed counts once for each of them. `deepest` is the depth
        of the deepest draft node, where it is known.
        """
        self.deepest = max(self.deepest, deepest, len(accepted_sources))
        self.num_steps += 1
        self.num_draft_tokens += len(draft_sources)
        self.num_accepted += len(accepted_sources)
        self.accepted_lengths[len(accepted_sources)] += 1
        self.drafted_by_source.update(chain.from_iterable(draft_sources))
        self.accepted_by_source.update(chain.from_iterable(accepted_sources))

    def add(self, other: SpeculationStats) -> None:
        """Take in another accumulator's counts."""
        self.num_steps += other.num_steps
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted += other.num_accepted
        self.deepest = max(self.deepest, other.deepest)
        self.accepted_lengths.update(other.accepted_lengths)
        self.accepted_by_source.update(other.accepted_by_source)
        self.drafted_by_source.update(other.drafted_by_source)
        new = [name for name in other.disabled_drafters if name not in self.disabled_drafters]
        self.disabled_drafters += new

    @property
    def tokens_per_step(self) -> float:
        """Accepted length + 1, averaged over steps (others call it mean acceptance length)."""
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted nodes / drafted nodes of the trees."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> SpeculationStats:
        """The counts that `as_wire` was made of.

        Example: `SpeculationStats.from_wire(stats.as_wire()) == stats`.
        """
        return cls(
            num_steps=wire["num_spec_steps"],
            num_draft_tokens=wire["num_draft_tokens"],
            num_accepted=wire["num_accepted_draft_tokens"],
            deepest=wire["num_spec_tokens"],
            accepted_lengths=Counter(
                {n: count for n, count in enumerate(wire["acceptance_histogram"]) if count}
            ),
            accepted_by_source=Counter(wire["accepted_by_source"]),
            drafted_by_source=Counter(wire["drafted_by_source"]),
            disabled_drafters=list(wire.get("disabled_drafters", ())),
        )

    def as_wire(self) -> dict[str, object]:
        """The `metrics.speculative_decoding` object that existing clients read.

        `acceptance_histogram[n]` counts the steps of accepted length n, up to `num_spec_tokens`,
        the depth of the deepest draft node.

        Example: `{"mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.3, ...}`.
        """
        return {
            "mean_acceptance_length": round(self.tokens_per_step, 4),
            "draft_acceptance_rate": round(self.acceptance_rate, 4),
            "acceptance_histogram": [self.accepted_lengths[n] for n in range(self.deepest + 1)],
            "num_spec_steps": self.num_steps,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.deepest,
            "accepted_by_source": dict(sorted(self.accepted_by_source.items())),
            "drafted_by_source": dict(sorted(self.drafted_by_source.items())),
            **({"disabled_drafters": self.disabled_drafters} if self.disabled_drafters else {}),
        }
