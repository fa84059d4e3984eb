"""StepRecord: what became of the guesses of one decode step, depth by depth, for who measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from specdec.commit import VerifiedStep
from specdec.tree import DraftTree


@dataclass(frozen=True)
class StepRecord:
    """One decode step of one request; a step without draft nodes has a record too.

    `proposed[i]` counts the nodes at depth i + 1 that drafters offered, `verified[i]` those that
    the controller let be verified. The walk stood before `num_evaluated` depths that had a verified
    node: at each of them a guess was judged. `num_accepted` of them gave an output token, the next
    `num_cut` were accepted too, but a stop or the longest length cut them off. By drafter, a node
    that several guessed counts for each: `evaluated_by` the nodes whose parent was reached,
    `accepted_by` those that gave an output token.

    Example: a chain of 4 whose third node is wrong has num_evaluated 3 and num_accepted 2.
    """

    proposed: tuple[int, ...]
    verified: tuple[int, ...]
    num_evaluated: int
    num_accepted: int
    num_cut: int
    num_tokens: int  # that the request got: accepted ones and the bonus token, unless cut
    evaluated_by: Mapping[str, int]
    accepted_by: Mapping[str, int]

    @classmethod
    def of(cls, candidates: DraftTree, item: VerifiedStep, num_tokens: int) -> StepRecord:
        """The record of a verified step of which `num_tokens` became output.

        candidates: the tree that drafters offered.
        """
        tree, path = item.tree, item.verdict.path
        num_accepted = min(num_tokens, len(path))
        judged = [child for node in (0, *path) for child in tree.children[node]]
        return cls(
            _by_depth(candidates),
            _by_depth(tree),
            len(path) + bool(tree.children[(0, *path)[-1]]),
            num_accepted,
            len(path) - num_accepted,
            num_tokens,
            _by_source([tree.sources[node] for node in judged]),
            _by_source([tree.sources[node] for node in path[:num_accepted]]),
        )

    def as_json(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return {
            "proposed": list(self.proposed),
            "verified": list(self.verified),
            "num_evaluated": self.num_evaluated,
            "num_accepted": self.num_accepted,
            "num_cut": self.num_cut,
            "num_tokens": self.num_tokens,
            "evaluated_by": dict(self.evaluated_by),
            "accepted_by": dict(self.accepted_by),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> StepRecord:
        """Example: `StepRecord.from_json(record.as_json()) == record`."""
        return cls(
            **{
                **fields,
                "proposed": tuple(fields["proposed"]),
                "verified": tuple(fields["verified"]),
            }
        )


def _by_depth(tree: DraftTree) -> tuple[int, ...]:
    counts = Counter(tree.depths)
    return tuple(counts[depth] for depth in range(1, max(tree.depths) + 1))


def _by_source(sources: Sequence[tuple[str, ...]]) -> dict[str, int]:
    return dict(Counter(chain.from_iterable(sources)))
