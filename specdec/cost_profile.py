"""CostProfile: times a few forwards at start and fits the table of step costs to them.

    seconds(requests, context, rows) = curve(rows)                  measured point by point
                                     + key * requests * context     reading keys and values
                                     + row_key * rows * context     attending to them
                                     + request * requests           what a segment costs

The last three are fitted, none negative, to a few forwards at longer contexts and of more
requests.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec import cost_cache
from specdec.batch_builder import BatchBuilder
from specdec.config import EngineConfig
from specdec.cost_table import CONTEXTS, MIN_SECONDS, CostTable, row_points
from specdec.kernels import dispatch
from specdec.kernels.batch import Batch
from specdec.loading import LoadedModel
from specdec.model import TargetModel
from specdec.model_runner import ModelRunner
from specdec.step_cost import StepCost

_CHECK_SECONDS = 0.3  # for a look at whether a cached table still holds
_SAME_SCALE = 3.0  # a machine whose forwards take up to so many times as long is the same, busier
_SAME_SHAPE = 1.5  # how much ratios of rows or requests may differ; steps learn the rest
_CHECK_ROWS = 16  # of one request, and of as many
_LONG_CONTEXT = 4096
_MANY_REQUESTS = (8, 16)
_FEW_ROWS = 64  # are known before more of them are tried
_ROWS_TO_DOUBLE = 32  # on a CPU rows cost at least this, where they were not measured

_log = logging.getLogger(__name__)


def measured_cost(
    loaded: LoadedModel,
    runner: ModelRunner,
    config: EngineConfig,
    *,
    seconds: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCost:
    """The costs of this model's steps on this machine, from the cache or measured within `seconds`.

    Overwrites the KV cache, so call it before the first request, after `runner.warm_up`. What is
    measured is kept under `cache_folder()/step-cost`; what steps teach later is not, for a few
    dozen steps teach it again. A cached table is compared with three forwards first. On a GPU one
    forward may have to be compiled and recorded, which is not interrupted.

    Example: `measured_cost(engine.loaded, engine.runner, engine.config, seconds=1.0)`.
    """
    started = clock()
    timer = ForwardTimer(loaded, runner, clock)
    identity = cost_cache.identity(loaded, config)
    cached = cost_cache.load(identity)
    if cached is not None:
        scale = _scale_now(cached, timer)
        if scale is not None:
            _log.info("step cost: cached, checked in %.2f s", clock() - started)
            return StepCost(cached.scaled(scale))
        _log.info("step cost: this machine differs from the cached one; measuring again")
    device = runner.kv_cache.device
    is_staircase = dispatch.uses_triton(device)
    row_multiple = 1
    if is_staircase and isinstance(loaded.model, TargetModel):
        row_multiple = loaded.model.weights.row_tile or 1
    key_bytes = loaded.model.kv_bytes_per_block(config.kv, config.block_size) / config.block_size
    table, num_measured = profile(
        timer,
        row_points(config.token_budget, is_staircase=is_staircase, row_multiple=row_multiple),
        max_requests=config.max_running,
        deadline=clock() + seconds,
        is_staircase=is_staircase,
        row_multiple=row_multiple,
        key_share=key_bytes / max(loaded.model.weight_bytes, 1),
    )
    _log.info("step cost: %d forwards measured in %.2f s", num_measured, clock() - started)
    cost_cache.save(identity, table)
    return StepCost(table)


@dataclass(frozen=True)
class Forward:
    """A decode forward: its rows are shared out among requests of the same context in tokens."""

    num_requests: int
    context: int
    num_rows: int


class ForwardTimer:
    """Times forwards of chains on an empty KV cache, from packing to having chosen tokens.

    `room` is the longest context, rows included. Requests read blocks of their own where there are
    enough.
    """

    def __init__(
        self, loaded: LoadedModel, runner: ModelRunner, clock: Callable[[], float]
    ) -> None:
        self.clock = clock
        self._runner = runner
        kv_cache = runner.kv_cache
        self.room = min(loaded.max_model_len, kv_cache.num_blocks * kv_cache.block_size)
        self.short_context = min(CONTEXTS[0], self.room // 2)
        self._touched: set[int] = set()
        # Mapping the first pages may take a second that the first request would have to wait.
        self._touch(range(min(kv_cache.num_blocks, -(-_LONG_CONTEXT // kv_cache.block_size))))

    def seconds(self, forward: Forward, deadline: float) -> float:
        """The least of five runs after a first one, of fewer where they take long or time is up.

        Whatever else runs only adds time. With no time for a second run, the first one's.
        """
        segments = self._batch(forward).segments
        self._touch(block for segment in segments for block in segment.block_ids)
        first = self._run(forward)
        runs: list[float] = []
        for _ in range(5 if first < 0.01 else 3):
            if self.clock() + first > deadline:
                break
            runs.append(self._run(forward))
        return max(min(runs or [first]), MIN_SECONDS)

    def _touch(self, block_ids: Iterable[int]) -> None:
        """Write to blocks: pages never written are one page of zeros, which caches hold."""
        fresh = set(block_ids) - self._touched
        self._runner.kv_cache.scrub(sorted(fresh))
        self._touched |= fresh

    def _run(self, forward: Forward) -> float:
        started = self.clock()
        output = self._runner.forward(self._batch(forward))
        output.logits.argmax(-1).tolist()  # waits for the device, as choosing tokens does
        return self.clock() - started

    def _batch(self, forward: Forward) -> Batch:
        kv_cache = self._runner.kv_cache
        builder = BatchBuilder(kv_cache.block_size)
        for index in range(forward.num_requests):
            count, more = divmod(forward.num_rows, forward.num_requests)
            count += index < more
            num_blocks = -(-(forward.context + count) // kv_cache.block_size)
            first = index * num_blocks
            blocks = [(first + block) % kv_cache.num_blocks for block in range(num_blocks)]
            builder.add(blocks, [0] * count, forward.context, wanted=range(count))
        return builder.build()


def profile(
    timer: ForwardTimer,
    rows: Sequence[int],
    *,
    max_requests: int,
    deadline: float,
    is_staircase: bool = False,
    row_multiple: int = 1,
    key_share: float = 0.0,
) -> tuple[CostTable, int]:
    """The table, and how many of its forwards were measured.

    Numbers of rows far apart come first, then contexts and requests, then the rows in between, the
    cheapest first; a forward that will not end in time is left out. `key_share` is the bytes of a
    token's keys and values over those of the weights, which says what they cost where no time was
    left to measure it.
    """
    measured: dict[Forward, float] = {}
    short = timer.short_context
    for forward in _forwards(timer, rows, max_requests):
        expected = _expected(measured, forward)
        if not measured or timer.clock() + 4 * expected < deadline:
            measured[forward] = timer.seconds(forward, deadline)
    by_rows = {f.num_rows: s for f, s in measured.items() if f == Forward(1, short, f.num_rows)}
    curve = dict(zip(rows, rows_curve(by_rows, rows, is_flat_allowed=is_staircase), strict=True))
    others = [forward for forward in measured if forward != Forward(1, short, forward.num_rows)]
    features = np.array([_features(forward, short) for forward in others]).reshape(-1, 3)
    excess = [measured[f] - np.interp(f.num_rows, rows, list(curve.values())) for f in others]
    key, row_key, request = non_negative_fit(features, np.array(excess))
    if not features[:, 1].any():
        key = key_share * curve[rows[0]]

    def seconds(num_requests: int, context: int, num_rows: int) -> float:
        keys, row_keys, others = _features(Forward(num_requests, context, num_rows), short)
        return float(curve[num_rows] + key * keys + row_key * row_keys + request * others)

    table = CostTable.of(
        seconds,
        max_rows=rows[-1],
        max_requests=max_requests,
        is_staircase=is_staircase,
        row_multiple=row_multiple,
    )
    return table, len(measured)


def rows_curve(
    measured: Mapping[int, float], rows: Sequence[int], *, is_flat_allowed: bool
) -> NDArray[np.float64]:
    """Seconds at all `rows`, from some of them: linear in between, and on beyond the last.

    Beyond, it rises as between the last two, or as over all if that is steeper, or on a CPU, where
    no number of rows is free for ever, by a share of the first. Never falls.

    Example: `rows_curve({1: 1.0, 4: 1.3}, (1, 2, 4, 8), is_flat_allowed=True)` ends in 1.7.
    """
    known = sorted(measured)
    # Other load only adds time: fewer rows take no longer than more rows were seen to take.
    costs = np.minimum.accumulate([measured[r] for r in reversed(known)])[::-1]
    slopes = [0.0 if is_flat_allowed else float(costs[0]) / _ROWS_TO_DOUBLE]
    if len(known) > 1:
        slopes += [(costs[-1] - costs[i]) / (known[-1] - known[i]) for i in (0, -2)]
    beyond = np.maximum(np.array(rows) - known[-1], 0)
    curve: NDArray[np.float64] = np.interp(rows, known, costs) + beyond * max(slopes)
    return curve


def non_negative_fit(
    features: NDArray[np.float64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The coefficients, none negative, with the least squared error; 0 for features of zeros.

    features: [num_values, num_features]; tries every set of features, so there may be only a few.
    """
    num_features = features.shape[1]
    best, least = np.zeros(num_features), float(values @ values)
    used = [index for index in range(num_features) if features[:, index].any()]
    for size in range(1, len(used) + 1):
        for chosen in itertools.combinations(used, size):
            columns = features[:, chosen]
            found = np.linalg.lstsq(columns, values, rcond=None)[0]
            error = float(((columns @ found - values) ** 2).sum())
            if (found >= 0).all() and error < least:
                least, best = error, np.zeros(num_features)
                best[list(chosen)] = found
    return best


def _features(forward: Forward, short: int) -> tuple[float, float, float]:
    """What a forward has beyond one request at the short context, as the model counts it."""
    n, longer = forward.num_requests, max(forward.context - short, 0)
    keys = max(n * forward.context - short, 0)
    return keys, forward.num_rows * longer, n - 1


def _forwards(timer: ForwardTimer, rows: Sequence[int], max_requests: int) -> list[Forward]:
    """What to measure, in order."""
    short = timer.short_context
    reachable = [r for r in rows if short + r <= timer.room] or [timer.room - short]
    few = [r for r in reachable if r <= _FEW_ROWS] or reachable[:1]
    coarse: list[int] = []
    for r in few:
        if not coarse or r >= 4 * coarse[-1]:
            coarse.append(r)
    others = []
    for r in (1, _CHECK_ROWS):
        long = min(_LONG_CONTEXT, timer.room - r)
        if long >= 2 * short:
            others.append(Forward(1, long, r))
    for n in sorted({min(n, max_requests) for n in _MANY_REQUESTS} - {1}):
        many = (Forward(n, short, n), Forward(n, short, 4 * n), Forward(n, CONTEXTS[1], n))
        others += [f for f in many if f.num_rows <= min(rows[-1], n * (timer.room - f.context))]
    others.sort(key=lambda forward: forward.num_rows)
    between = [r for r in reachable if r not in coarse]
    alone = [Forward(1, short, r) for r in (*coarse, *between)]
    return [*alone[: len(coarse)], *others, *alone[len(coarse) :]]


def _expected(measured: Mapping[Forward, float], forward: Forward) -> float:
    """About the longest that a forward may take, by the largest measured of no more rows."""
    smaller = [f for f in measured if f.num_rows <= forward.num_rows]
    if not smaller:
        return min(measured.values(), default=0.0)
    nearest = max(smaller, key=lambda f: f.num_rows)
    more = forward.num_rows - nearest.num_rows
    return measured[nearest] * min(forward.num_rows / nearest.num_rows, 1 + more / 8)


def _scale_now(cached: CostTable, timer: ForwardTimer) -> float | None:
    """How many times as long forwards take as in the table, None if it does not hold here."""
    deadline = timer.clock() + _CHECK_SECONDS
    short, fewest = timer.short_context, cached.rows[0]
    most = [r for r in cached.rows if r <= max(_CHECK_ROWS, 4 * fewest)][-1]
    many = min(_CHECK_ROWS, cached.requests[-1], timer.room - short)
    ratios: list[float] = []
    for count, wanted in ((1, fewest), (1, most), (many, max(many, fewest))):
        if not ratios or timer.clock() < deadline:
            rows = min(wanted, timer.room - short)
            seconds = timer.seconds(Forward(count, short, rows), deadline)
            expected = StepCost(cached).forward_s(count, short, rows)[rows]
            ratios.append(math.log(seconds / expected))
    scale, shape = statistics.fmean(ratios), max(ratios) - min(ratios)
    if abs(scale) > math.log(_SAME_SCALE) or shape > math.log(_SAME_SHAPE):
        return None
    return math.exp(scale)
