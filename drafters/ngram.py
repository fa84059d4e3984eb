"""NgramDrafter: prompt lookup (Saxena 2023) over prompt and output, as a tree."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.drafting import Drafter
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree

SIZES = (4, 3, 2)  # n-gram sizes, longest suffix first
NUM_MATCHES = 2  # most recent places remembered per n-gram


class NgramIndex:
    """Where each n-gram of a growing token list was last followed by something.

    Appending a token costs a constant number of dictionary updates, so a step's cost does not
    grow with the context.

    Example: after [1, 2, 3, 9, 1, 2, 3] the suffix (1, 2, 3) was followed at index 3 by 9.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._places: dict[
            tuple[int, ...], tuple[int, ...]
        ] = {}  # n-gram -> next index, recent first

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; n-grams are entered once a token follows them."""
        for token_id in token_ids:
            end = len(self.token_ids)
            for size in SIZES:
                if size <= end:
                    key = tuple(self.token_ids[end - size :])
                    older = self._places.get(key, ())[: NUM_MATCHES - 1]
                    self._places[key] = (end, *older)
            self.token_ids.append(token_id)

    def continuations(self, length: int) -> list[tuple[int, list[int]]]:
        """(matched size, tokens) that followed earlier occurrences of the current suffix.

        Longest suffix first, most recent first; each place once. A continuation that runs into
        the end of the list goes on with its own tokens, as a repeated text does.
        """
        found: dict[int, int] = {}
        for size in SIZES:
            for place in self._places.get(tuple(self.token_ids[-size:]), ()):
                found.setdefault(place, size)
        return [(size, self._copy(place, length)) for place, size in found.items()]

    def _copy(self, place: int, length: int) -> list[int]:
        tokens = self.token_ids[place : place + length]
        while len(tokens) < length:
            tokens.append(tokens[len(tokens) - (len(self.token_ids) - place)])
        return tokens


class NgramDrafter(Drafter):
    """Guesses that the text goes on as it did after earlier occurrences of its last tokens.

    The longest, most recent match gets most of the budget; others branch off it. Each request is
    looked up in its own tokens only.
    """

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: dict[str, NgramIndex] = {}

    def admit(self, request: Request) -> None:
        """Start an index; it is filled when the first draft is due."""
        self._indexes[request.request_id] = NgramIndex()

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """One tree per step, root-only where nothing matches."""
        return [self._draft(step) for step in steps]

    def _draft(self, step: DecodeStep) -> DraftTree:
        if step.node_budget == 0:
            return DraftTree.root_only(step.root)
        index = self._indexes[step.request.request_id]
        index.extend(step.request.token_ids[len(index.token_ids) :])
        paths = [
            tokens[: _reach(size, step.node_budget)]
            for size, tokens in index.continuations(step.node_budget)
        ]
        return DraftTree.from_paths(
            step.root, paths, source=self.name, node_budget=step.node_budget
        )

    def release(self, request: Request) -> None:
        """Drop the request's index."""
        self._indexes.pop(request.request_id, None)


def _reach(matched: int, node_budget: int) -> int:
    """How far to trust a match: two tokens matched promise less than four."""
    return node_budget if matched >= SIZES[0] else min(node_budget, 2 * matched)
