"""PredictionDrafter: drafts that follow the text which the caller expects back.

The caller hands over `Request.prediction_ids` (OpenAI's `prediction`). Drafts follow it through
insertions, deletions and replaced spans: `specdec.drafters.alignment` says where the answer may
stand in the text and how likely each place is, and the likeliest nodes make the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from specdec.drafters.alignment import Alignment, Guess, PredictedText
from specdec.drafting import Drafter
from specdec.loading import LoadedModel
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import ROOT_SOURCE, DraftTree

MIN_REACH = 0.02  # P(reached) below which a node is not worth its row


class PredictionDrafter(Drafter):
    """Guesses that the answer is the request's predicted text, with edits.

    The text's tokens count as accepted or rejected under the name "prediction": a rejected one was
    drafted as a node and not accepted, wherever in the tree it stood.
    """

    name = "prediction"

    @classmethod
    def suits(cls, target: LoadedModel) -> bool:
        """Any: it is not asked where no text is predicted."""
        return True

    def __init__(self) -> None:
        self._alignments: dict[str, Alignment] = {}

    def serves(self, request: Request) -> bool:
        """Where a text is predicted."""
        return bool(request.prediction_ids)

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """One tree per step, root-only where the answer is far from the predicted text."""
        return [self._draft(step) for step in steps]

    def _draft(self, step: DecodeStep) -> DraftTree:
        request = step.request
        if step.node_budget == 0:
            return DraftTree.root_only(step.root)
        alignment = self._alignments.get(request.request_id)
        if alignment is None:
            alignment = Alignment(PredictedText(request.prediction_ids))
            self._alignments[request.request_id] = alignment
        num_known = len(request.prompt_ids) + len(alignment.output)
        for token_id in request.token_ids[num_known:]:
            alignment.advance(token_id)
        return grow(alignment, step.root, step.node_budget)

    def release(self, request: Request) -> None:
        """Drop the request's alignment."""
        self._alignments.pop(request.request_id, None)


class Bud(NamedTuple):
    """A node that may be added; those most likely to be reached are added first."""

    reach: float  # minus P(accepted), so that a heap gives the likeliest first
    order: int  # among equals, the first found first
    parent: int
    token_id: int
    score: float
    guesses: list[Guess]


def grow(alignment: Alignment, root: int, node_budget: int) -> DraftTree:
    """The `node_budget` likeliest nodes as a tree, the likeliest path laid first."""
    order = count()
    buds: list[Bud] = []

    def sprout(parent: int, reach: float, guesses: Sequence[Guess]) -> None:
        for token_id, after in alignment.branches(guesses).items():
            weight = sum(guess.weight for guess in after)
            if weight >= MIN_REACH:
                score = min(1.0, weight / reach)
                heappush(buds, Bud(-weight, next(order), parent, token_id, score, after))

    sprout(0, 1.0, alignment.guesses())
    chosen: list[Bud] = []
    while buds and len(chosen) < node_budget:
        bud = heappop(buds)
        chosen.append(bud)
        sprout(len(chosen), -bud.reach, bud.guesses)
    return DraftTree.depth_first(
        [root, *(bud.token_id for bud in chosen)],
        [-1, *(bud.parent for bud in chosen)],
        [1.0, *(bud.score for bud in chosen)],
        [(ROOT_SOURCE,), *[(PredictionDrafter.name,)] * len(chosen)],
    )
