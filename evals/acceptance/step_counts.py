"""StepCounts: what became of the guesses of many steps, by position, accepted length and drafter.

Position i is the i-th guess after the root, the depth of a node. At most one node of each depth is
accepted, so accepted and evaluated ones are steps, while offered and verified ones are nodes, of
which a tree has several at a depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, zip_longest
from typing import Any

from specdec.metrics import SpeculationStats
from specdec.step_record import StepRecord

Counts = tuple[int, ...]
_BY_POSITION = ("offered", "verified", "evaluated", "cut_by_stop", "cut_by_length")


@dataclass(frozen=True)
class SourceCounts:
    """Nodes of one drafter; a node that several guessed counts for each. None: not told."""

    verified: int
    evaluated: int | None
    accepted: int

    def __add__(self, other: SourceCounts) -> SourceCounts:
        return SourceCounts(
            self.verified + other.verified,
            _sum(self.evaluated, other.evaluated),
            self.accepted + other.accepted,
        )


@dataclass(frozen=True)
class StepCounts:
    """Counts over decode steps; those without a draft node are steps too.

    `histogram[n]` counts the steps of accepted length n. By position, `[i]` being position i + 1:
    nodes that drafters offered, nodes that were verified, steps whose walk stood before a verified
    node there, and steps whose node there was right but cut off by a stop or the longest length.
    None is what a server did not tell.

    Example: `StepCounts.of(generation.steps, "stop", generation.stats.drafted_by_source)`.
    """

    num_steps: int = 0
    num_verified: int = 0  # nodes
    num_accepted: int = 0  # nodes that became output
    num_zero_draft: int | None = 0  # steps that verified no node
    histogram: Counts = ()
    offered: Counts | None = ()
    verified: Counts | None = ()
    evaluated: Counts | None = ()
    cut_by_stop: Counts | None = ()
    cut_by_length: Counts | None = ()
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        steps: Sequence[StepRecord],
        finish_reason: str,
        verified_by: Mapping[str, int],
    ) -> StepCounts:
        """The counts of one answer; verified_by: its verified nodes by drafter."""
        evaluated_by: Counter[str] = Counter()
        accepted_by: Counter[str] = Counter()
        for step in steps:
            evaluated_by.update(step.evaluated_by)
            accepted_by.update(step.accepted_by)
        cut = _added(
            (0,) * step.num_accepted + (1,) * step.num_cut for step in steps if step.num_cut
        )
        return cls(
            num_steps=len(steps),
            num_verified=sum(sum(step.verified) for step in steps),
            num_accepted=sum(step.num_accepted for step in steps),
            num_zero_draft=sum(not sum(step.verified) for step in steps),
            histogram=_histogram(Counter(step.num_accepted for step in steps)),
            offered=_added(step.offered for step in steps),
            verified=_added(step.verified for step in steps),
            evaluated=_added((1,) * step.num_evaluated for step in steps),
            cut_by_stop=cut if finish_reason == "stop" else (),
            cut_by_length=cut if finish_reason == "length" else (),
            sources={
                name: SourceCounts(number, evaluated_by[name], accepted_by[name])
                for name, number in sorted(verified_by.items())
            },
        )

    @classmethod
    def of_server(cls, stats: SpeculationStats) -> StepCounts:
        """What a server tells of one answer."""
        return cls(
            num_steps=stats.num_steps,
            num_verified=stats.num_draft_tokens,
            num_accepted=stats.num_accepted,
            num_zero_draft=None,
            histogram=_histogram(stats.accepted_lengths),
            **dict.fromkeys(_BY_POSITION),
            sources={
                name: SourceCounts(number, None, stats.accepted_by_source[name])
                for name, number in sorted(stats.drafted_by_source.items())
            },
        )

    @classmethod
    def total(cls, parts: Iterable[StepCounts]) -> StepCounts:
        """The sums; what one of them does not tell, their sum does not either."""
        parts = list(parts)
        sources: dict[str, SourceCounts] = {}
        for part in parts:
            for name, counts in part.sources.items():
                sources[name] = sources[name] + counts if name in sources else counts
        zero_draft = [part.num_zero_draft for part in parts]
        by_position = {name: [getattr(part, name) for part in parts] for name in _BY_POSITION}
        return cls(
            num_steps=sum(part.num_steps for part in parts),
            num_verified=sum(part.num_verified for part in parts),
            num_accepted=sum(part.num_accepted for part in parts),
            num_zero_draft=None if None in zero_draft else sum(filter(None, zero_draft)),
            histogram=_added(part.histogram for part in parts),
            **{
                name: None if None in values else _added(values)
                for name, values in by_position.items()
            },
            sources=dict(sorted(sources.items())),
        )

    @property
    def accepted(self) -> Counts:
        """Steps that accepted a node at each position: those of at least that accepted length."""
        return tuple(accumulate(self.histogram[:0:-1]))[::-1]

    def as_json(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return found | {"sources": {name: vars(counts) for name, counts in self.sources.items()}}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> StepCounts:
        """Example: `StepCounts.from_json(counts.as_json()) == counts`."""
        tuples = {
            name: None if found[name] is None else tuple(found[name])
            for name in ("histogram", *_BY_POSITION)
        }
        sources = {name: SourceCounts(**counts) for name, counts in found["sources"].items()}
        return cls(**{**found, **tuples, "sources": sources})


def at(counts: Counts | None, index: int) -> int | None:
    """The count at an index; 0 where a shorter answer has none, None where nothing was told."""
    if counts is None:
        return None
    return counts[index] if index < len(counts) else 0


def _added(rows: Iterable[Counts]) -> Counts:
    """Sums by position; rows may be of any length."""
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))


def _histogram(lengths: Counter[int]) -> Counts:
    return tuple(lengths[length] for length in range(max(lengths, default=-1) + 1))


def _sum(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left + right
