"""StepRecord: what became of the guesses of one decode step, depth by depth, for who measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # brings torch, and the server's process goes without
    from specdec.tree import DraftTree


@dataclass(frozen=True)
class StepRecord:
    """One decode step of one request; a step without draft nodes has a record too.

    `offered[i]` counts the nodes at depth i + 1 that drafters offered, `verified[i]` those that
    the controller let be verified. The walk stood before `num_evaluated` depths that had a verified
    node: at each of them a guess was judged. `num_accepted` of them gave an output token, the next
    `num_cut` were accepted too, but a stop or the longest length cut them off. By drafter, a node
    that several guessed counts for each: `evaluated_by` the nodes whose parent was reached,
    `accepted_by` those that gave an output token.

    Example: a chain of 4 whose third node is wrong has num_evaluated 3 and num_accepted 2.
    """

    offered: tuple[int, ...]
    verified: tuple[int, ...]
    num_evaluated: int
    num_accepted: int
    num_cut: int
    num_tokens: int  # that the request got: accepted ones and the bonus token, unless cut
    evaluated_by: Mapping[str, int]
    accepted_by: Mapping[str, int]

    @classmethod
    def of(
        cls, candidates: DraftTree, tree: DraftTree, path: Sequence[int], num_tokens: int
    ) -> StepRecord:
        """The record of a step of which `num_tokens` became output.

        candidates: the tree that drafters offered; tree: the part of it that was verified; path:
        its accepted nodes.
        """
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


def _by_depth(tree: DraftTree) -> tuple[int, ...]:
    counts = Counter(tree.depths)
    return tuple(counts[depth] for depth in range(1, max(tree.depths) + 1))


def _by_source(sources: Sequence[tuple[str, ...]]) -> dict[str, int]:
    return dict(Counter(chain.from_iterable(sources)))
