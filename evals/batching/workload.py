"""Workload: how many tokens each request wants, and in which step it can begin."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import numpy as np

from specdec.errors import UsageError

GENERATORS = ("python", "numpy")
MAX_STEPS = 10_000_000  # of one slot; they are simulated in memory


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival. A request takes one step per token and begins at `arrivals[i]`
    or later; each step all slots that hold a request yield one token.

    Example: `Workload.drawn(1000, 10, 500, seed=7)` arrives all at once.
    """

    lengths: tuple[int, ...]
    arrivals: tuple[int, ...]

    @classmethod
    def drawn(
        cls,
        num_requests: int,
        shortest: int,
        longest: int,
        *,
        seed: int,
        rate: float = 0.0,
        generator: str = "python",
    ) -> Workload:
        """Uniform lengths, both ends among them. `rate` is of Poisson arrivals, in requests per
        step; 0 means that all are there at once. Raises UsageError if it is too much to simulate.

        generator: `python` is random.Random(seed).randint, `numpy` default_rng(seed).integers; both
        give the same sequence for ever. Arrivals have a generator of their own, so that
        they do not change the lengths.
        """
        if generator == "numpy":
            drawn = np.random.default_rng(seed).integers(shortest, longest + 1, num_requests)
            lengths: Sequence[int] = drawn.tolist()
        else:
            rng = random.Random(seed)
            lengths = [rng.randint(shortest, longest) for _ in range(num_requests)]
        arrivals = (0,) * num_requests
        if rate > 0.0:
            gaps = random.Random(f"arrivals {seed}")
            times = accumulate(gaps.expovariate(rate) for _ in lengths)
            arrivals = tuple(ceil(time) for time in times)
        if arrivals[-1] + sum(lengths) > MAX_STEPS:
            raise UsageError(
                f"one slot would take more than {MAX_STEPS} steps: ask for fewer or shorter"
                " requests, or for more arrivals"
            )
        return cls(tuple(lengths), arrivals)
