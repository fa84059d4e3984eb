"""VirtualMachine: what steps cost on hardware that is not at hand, in virtual seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specdec.cuda_graphs import row_bucket
from specdec.step_cost import StepCost

Shape = Callable[[int], float]
"""Rows of a forward to its seconds, in those of one row."""

OUTLIER = 20.0  # times as long: another process had the machine


@dataclass(frozen=True)
class Noise:
    """Multiplies what is measured: log-normal with mean 1, and now and then an outlier.

    `sigma` is the standard deviation of the logarithm, `outlier_share` of steps take OUTLIER
    times as long.
    """

    sigma: float = 0.0
    outlier_share: float = 0.0

    def factor(self, seed: int, step: int) -> float:
        """What the measured times of this step are multiplied by."""
        if not (self.sigma or self.outlier_share):
            return 1.0
        draw = np.random.default_rng([seed, step, 77])
        factor = math.exp(self.sigma * draw.standard_normal() - self.sigma**2 / 2)
        return factor * (OUTLIER if draw.random() < self.outlier_share else 1.0)


@dataclass(frozen=True)
class Drift:
    """Steps become those of `machine`, linearly while tokens `begin` to `end` are generated.

    Tokens are the clock because they are the same for every policy; begin == end is sudden.
    """

    machine: VirtualMachine
    begin: int
    end: int

    def share(self, num_tokens: int) -> float:
        """How much of the way is gone, between 0 and 1."""
        if num_tokens >= self.end:
            return 1.0
        return max(0.0, (num_tokens - self.begin) / max(1, self.end - self.begin))


@dataclass(frozen=True)
class VirtualMachine:
    """Seconds of a step's parts as a function of its size. What is measured may be noisy.

    A forward of `rows` rows (roots and nodes) for `num_requests` requests with a mean context of
    `context` tokens takes `row_s * shape(rows) + kv_s * num_requests * context` seconds, the rest
    of a step `rest_s`. On a staircase, rows are computed in the buckets of CUDA graphs.

    Example: `memory_bound().forward_s(1, 512, 16)` is hardly more than for one row.
    """

    name: str
    row_s: float
    shape: Shape
    kv_s: float = 0.0
    rest_s: float = 0.0
    is_staircase: bool = False
    noise: Noise = Noise()
    drift: Drift | None = None

    def forward_s(self, num_requests: int, context: float, rows: int, num_tokens: int = 0) -> float:
        """True seconds of a forward once `num_tokens` tokens are generated."""
        computed = row_bucket(rows, 1) if self.is_staircase else rows
        seconds = self.row_s * self.shape(computed) + self.kv_s * num_requests * context
        if self.drift is None:
            return seconds
        share = self.drift.share(num_tokens)
        later = self.drift.machine.forward_s(num_requests, context, rows)
        return (1 - share) * seconds + share * later

    def step_cost(self, max_requests: int, max_rows: int, *, wrong_by: float = 0.0) -> StepCost:
        """The curve as a start-up profile would have found it, measured without noise.

        Each doubling of rows looks `wrong_by` dearer than it is (cheaper if negative): at 0.1, 64
        rows look 1.8 times as dear as they are.
        """

        def profile(num_requests: int, context: int, rows: int) -> float:
            bent: float = (1.0 + wrong_by) ** math.log2(rows)
            return self.forward_s(num_requests, context, rows) * bent

        return StepCost.of(
            profile,
            max_rows=max_rows,
            max_requests=max_requests,
            is_staircase=self.is_staircase,
        )

    def curve(self, num_requests: int, context: int, max_rows: int) -> NDArray[np.float64]:
        """[max_rows + 1]: the start's seconds by rows, those below `num_requests` like there."""
        return np.array(
            [
                self.forward_s(num_requests, context, max(rows, num_requests))
                for rows in range(max_rows + 1)
            ]
        )

    def noisy(self, sigma: float = 0.1, outlier_share: float = 0.01) -> VirtualMachine:
        """The same machine, measured badly."""
        return replace(self, name=f"{self.name}, noisy", noise=Noise(sigma, outlier_share))

    def slower(self, factor: float) -> VirtualMachine:
        """The same machine, `factor` times as slow in every part of a forward."""
        return replace(self, row_s=factor * self.row_s, kv_s=factor * self.kv_s)

    def becoming(self, machine: VirtualMachine, begin: int, end: int) -> VirtualMachine:
        """This machine until `begin` tokens are generated, and `machine` from `end` on."""
        return replace(self, name=f"{self.name}, drifting", drift=Drift(machine, begin, end))


def memory_bound(crossover: int = 200, row_s: float = 10e-3, name: str = "gpu") -> VirtualMachine:
    """A GPU: flat up to `crossover` rows, then linear; a staircase over row buckets."""
    shape = partial(_flat_then_linear, crossover)
    return VirtualMachine(
        name, row_s, shape, kv_s=row_s * 1e-6, rest_s=row_s / 50, is_staircase=True
    )


def four_bit_gpu() -> VirtualMachine:
    """A GPU with 4-bit weights: reads a quarter, so it computes from about 50 rows on."""
    return memory_bound(50, 3e-3, "gpu, 4 bits")


def compute_bound(slope: float = 0.05, row_s: float = 10e-3) -> VirtualMachine:
    """A CPU: each further row costs `slope` of the first."""
    name = f"cpu, {slope:.0%} a row"
    return VirtualMachine(name, row_s, partial(_linear, slope), kv_s=row_s * 1e-6, rest_s=1e-4)


def mixture_of_experts() -> VirtualMachine:
    """Early rows touch new experts and cost much; once all are touched, further rows are cheap."""
    return VirtualMachine("experts", 8e-3, _experts, kv_s=8e-9, rest_s=2e-4)


def standard_machines() -> tuple[VirtualMachine, ...]:
    """One of each, for reports and tests."""
    return (
        memory_bound(),
        four_bit_gpu(),
        compute_bound(0.03),
        compute_bound(0.10),
        mixture_of_experts(),
    )


def _flat_then_linear(crossover: int, rows: int) -> float:
    """The flat part rises a little: activations and attention grow with rows."""
    return max(1.0 + 0.1 * rows / crossover, 1.1 * rows / crossover)


def _linear(slope: float, rows: int) -> float:
    return 1.0 + slope * (rows - 1)


def _experts(rows: int) -> float:
    return 1.0 + 2.0 * (1.0 - math.exp(-(rows - 1) / 12)) + rows / 400
