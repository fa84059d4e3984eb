"""Arrivals: when the requests of an open loop are sent, drawn before any is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from specdec.evals.load.extent import Extent


@dataclass(frozen=True)
class Schedule:
    """Seconds from the start: `warmup` and `counted` are sent then, and counting begins at `begin`.

    Example: `Schedule.draw(2.0, 1.0, 0, Extent(requests=100)).counted[0]`.
    """

    warmup: tuple[float, ...]
    counted: tuple[float, ...]

    @classmethod
    def draw(cls, rate: float, burstiness: float, seed: int, extent: Extent) -> Schedule:
        """Draw it; the same seed gives the same one. At least one request is counted."""
        times = arrival_times(rate, burstiness, seed)
        warmup = tuple(islice(times, extent.open_warmup(rate)))
        if extent.requests is not None:
            return cls(warmup, tuple(islice(times, extent.requests)))
        end = (warmup[-1] if warmup else 0.0) + (extent.duration_s or 0.0)
        counted = [next(times)]
        while (at := next(times)) < end:
            counted.append(at)
        return cls(warmup, tuple(counted))

    @property
    def begin(self) -> float:
        """The last arrival that is not counted, so that a gap stands before each that is."""
        return self.warmup[-1] if self.warmup else 0.0


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests are sent, without end.

    Gaps have the mean 1 / rate and a gamma distribution of the shape `burstiness`, as in vLLM's
    benchmark: 1 is a Poisson process, less comes in bursts, more is more even. The standard
    deviation of a gap over its mean is 1 / sqrt(burstiness).

    Example: `list(islice(arrival_times(2.0, 1.0, seed=0), 100))`.
    """
    rng = np.random.default_rng(seed)
    now = 0.0
    while True:
        now += float(rng.gamma(burstiness, 1.0 / (rate * burstiness)))
        yield now
