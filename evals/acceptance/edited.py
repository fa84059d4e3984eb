"""Edited: an answer as somebody would have predicted it who had three places wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence

NUM_EDITS = 3
SHARE = 0.05  # of the tokens that are edited


def with_edits(token_ids: Sequence[int], seed: int, vocab_size: int) -> tuple[int, ...]:
    """The tokens with one span replaced, one left out and one put in, far from each other.

    The spans have SHARE of the tokens between them, one at least each; other tokens stay as they
    are. Example: `with_edits(answer, seed=0, vocab_size=49152)`.
    """
    rng = random.Random(seed)
    length = max(1, round(SHARE * len(token_ids) / NUM_EDITS))
    third = max(1, len(token_ids) // NUM_EDITS)
    parts: list[int] = []
    kinds = ["replace", "delete", "insert"]
    rng.shuffle(kinds)
    for index, kind in enumerate(kinds):
        end = len(token_ids) if index + 1 == NUM_EDITS else (index + 1) * third
        part = list(token_ids[index * third : end])
        at = rng.randrange(max(1, len(part) - length))
        wrong = [rng.randrange(vocab_size) for _ in range(length)]
        part[at : at + (0 if kind == "insert" else length)] = [] if kind == "delete" else wrong
        parts += part
    return tuple(parts)
