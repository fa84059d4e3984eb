"""Policies: when each request begins under static, dynamic and continuous batching."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specdec.evals.batching.workload import Workload

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """Which steps each request holds one of `num_slots` slots in: `lengths[i]` from `starts[i]` on.

    Example: `continuous(workload, 8).num_steps`.
    """

    workload: Workload
    num_slots: int
    starts: tuple[int, ...]

    @cached_property
    def active(self) -> Ints:
        """Requests that yield a token, step by step, from step 0 to the last. [steps]"""
        starts, lengths = np.array(self.starts), np.array(self.workload.lengths)
        changes = np.bincount(starts, minlength=int((starts + lengths).max()) + 1)
        changes -= np.bincount(starts + lengths, minlength=len(changes))
        return np.asarray(np.cumsum(changes)[:-1], dtype=np.int64)

    @property
    def num_steps(self) -> int:
        """Steps with a request, forwards that is; a server without one waits."""
        return int(np.count_nonzero(self.active))

    @property
    def num_idle(self) -> int:
        """Steps' time without any request, before the last one ends."""
        return len(self.active) - self.num_steps

    @property
    def utilisation(self) -> float:
        """Tokens by slots and steps with a request: 1 if no slot was ever empty in one."""
        return sum(self.workload.lengths) / (self.num_slots * self.num_steps)

    @property
    def waits(self) -> tuple[int, ...]:
        """Steps from arrival to begin, by request."""
        return tuple(
            start - arrival
            for start, arrival in zip(self.starts, self.workload.arrivals, strict=True)
        )

    @property
    def latencies(self) -> tuple[int, ...]:
        """Steps from arrival to the last token, by request."""
        return tuple(
            wait + length for wait, length in zip(self.waits, self.workload.lengths, strict=True)
        )


def static(workload: Workload, num_slots: int) -> Schedule:
    """Batches of `num_slots` in order of arrival; each begins when it is full and the one before
    has ended, which is with its longest request. The last one may be smaller.
    """
    return dynamic(workload, num_slots, max_wait=math.inf)


def dynamic(workload: Workload, num_slots: int, max_wait: float) -> Schedule:
    """Batches of what has arrived, up to `num_slots`: once that many are there, or the first has
    waited `max_wait` steps, and the batch before has ended. It then runs to its end like a static
    one. No batch waits where nobody is still to come.
    """
    arrivals, lengths = workload.arrivals, workload.lengths
    starts: list[int] = []
    is_free = 0
    while len(starts) < len(arrivals):
        first = len(starts)
        is_full = arrivals[min(first + num_slots, len(arrivals)) - 1]
        start = int(max(is_free, min(is_full, arrivals[first] + max_wait)))
        last = first
        while last < min(first + num_slots, len(arrivals)) and arrivals[last] <= start:
            last += 1
        starts += [start] * (last - first)
        is_free = start + max(lengths[first:last])
    return Schedule(workload, num_slots, tuple(starts))


def continuous(workload: Workload, num_slots: int) -> Schedule:
    """A slot takes the next request in the step after it was freed."""
    is_free = [0] * num_slots
    starts = []
    for arrival, length in zip(workload.arrivals, workload.lengths, strict=True):
        start = max(arrival, is_free[0])
        starts.append(start)
        heapq.heapreplace(is_free, start + length)
    return Schedule(workload, num_slots, tuple(starts))


def policies(max_wait: float) -> dict[str, Callable[[Workload, int], Schedule]]:
    """All three by name."""
    return {
        "static": static,
        "dynamic": lambda workload, num_slots: dynamic(workload, num_slots, max_wait),
        "continuous": continuous,
    }
