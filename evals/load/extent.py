"""Extent: how much of a level is counted, and what comes before."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specdec.evals.load.level import Level

PER_CLIENT, OPEN = 8, 64


@dataclass(frozen=True)
class Extent:
    """So many counted requests, or all that are sent in so many seconds, after the warm-up.

    Without either, `at` says how many requests a level has.

    `warmup` requests are sent first and not counted. None leaves it to the kind of loop: a closed
    one counts from the moment when each of its clients has had an answer, an open one sends a tenth
    as many requests as it counts, at least one.

    Example: `Extent(requests=64, warmup=8)`.
    """

    requests: int | None = None
    duration_s: float | None = None
    warmup: int | None = None

    def at(self, level: Level) -> Extent:
        """The same for one level, where it is left to it: PER_CLIENT requests per client, at least
        two rounds of that, or OPEN of an open loop.
        """
        if self.requests is not None or self.duration_s is not None:
            return self
        number = OPEN if level.concurrency is None else PER_CLIENT * max(2, level.concurrency)
        return replace(self, requests=number)

    def open_warmup(self, rate: float) -> int:
        """Requests before the counted ones, of an open loop."""
        if self.warmup is not None:
            return self.warmup
        return math.ceil((self.requests or rate * (self.duration_s or 0.0)) / 10)
