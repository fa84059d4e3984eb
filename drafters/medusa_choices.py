"""Choices: sparse trees of Medusa heads, as paths of ranks (Cai et al. 2024).

A choice (0, 2) is the third guess of head 1 below the first guess of head 0. A list of choices is
in order of worth: a smaller node budget takes its first ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

Choice = tuple[int, ...]

# The lists published with the Medusa checkpoints; a digit is a rank, so "02" is (0, 2).
_PUBLISHED = {
    "mc_sim_7b_63": """0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9
        100 020 12 003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22
        80 050 15 101 021 90 060 0001 16 070""",
    "vicuna_7b_stage2": """0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020
        30 011 06 6 07 004 40 12 08 7 030 0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007
        0002 008 110 0100 60 9 013 0003 102 050 31 0020 70 14""",
    "vicuna_13b_stage2": """0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5
        30 011 06 004 0001 07 005 12 0010 030 101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100
        021 007 110 13 0020 9 008 050 0003 009 013 102 0011 300 1000""",
    "vicuna_33b_stage2": """0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30
        020 06 011 6 004 07 7 12 40 8 030 005 0001 08 21 09 101 200 006 50 0010 13 012 040 007 021
        9 110 0002 60 008 0100 70 013 050 14 009 31 102 22""",
    "zephyr_stage2": """0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003
        100 09 020 12 40 8 9 21 011 004 0000 50 030 13 005 006 60 200 101 012 040 14 31 22 007 70
        021 008 013 050 15 009 110 0001 0010 41 23""",
}

PUBLISHED: dict[str, tuple[Choice, ...]] = {
    name: tuple(tuple(map(int, path)) for path in paths.split())
    for name, paths in _PUBLISHED.items()
}


def best_choices(ranks: Sequence[Sequence[float]], count: int) -> tuple[Choice, ...]:
    """The `count` choices of the greatest measured worth, greatest first.

    ranks[head][rank]: how often the rank-th guess of the head was right given that its parent was.
    A choice is worth the product over its path, so what is taken is a tree.

    Example: `best_choices([[0.6, 0.2], [0.5, 0.1]], 3) == ((0,), (0, 0), (1,))`.
    """
    taken: list[Choice] = []
    heap: list[tuple[float, Choice]] = []
    for rank, worth in enumerate(ranks[0] if ranks else ()):
        heap.append((-worth, (rank,)))
    heapq.heapify(heap)
    while heap and len(taken) < count:
        worth, choice = heapq.heappop(heap)
        taken.append(choice)
        if len(choice) < len(ranks):
            for rank, share in enumerate(ranks[len(choice)]):
                heapq.heappush(heap, (worth * share, (*choice, rank)))
    return tuple(taken)


def worths(ranks: Sequence[Sequence[float]], count: int) -> tuple[float, ...]:
    """How often each of the `best_choices` is accepted, that is, all on its path are.

    Example: `worths([[0.6, 0.2], [0.5, 0.1]], 3) == (0.6, 0.3, 0.2)`.
    """
    return tuple(
        math.prod(ranks[head][rank] for head, rank in enumerate(choice))
        for choice in best_choices(ranks, count)
    )
