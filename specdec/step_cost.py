"""StepCost: what a step costs, measured: its forward, its drafters and the rest, refined by each.

The forward is a table measured at start (specdec/cost_profile.py) times corrections learned from
the steps that are run. All corrections are logarithms of factors:

    log observed = log table + scale + shape at (requests, context, rows) + noise

The scale follows the machine within some 30 steps; the shape follows slowly what the scale cannot
explain. One step alone, however slow, moves neither: the scale takes the median of five, and a
shape changes once two visits of a place agree.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.cost_table import CONTEXTS, MAX_SECONDS, CostTable, Curve, place
from specdec.decision import StepTimes

_WINDOW = 5  # observations whose median counts
_RATE = 0.1  # of a running estimate's way to the new median
_HALF_TRUST = 5.0  # visits of a place after which it has as much say as it lacks
_MEMORY = 0.98  # of a visit, from one step to the next: where no step has been for long is new
_BIAS_RATE = 0.2
_MIN_VISITS = 3.0  # the first residual that counts moves a shape by a third of itself
_SHARED = 0.75  # of what is learned of a shape holds for all requests and contexts
_MAX_CHANGE = 0.5  # of one residual, 1.6 times
_MAX_SHAPE = 2.0  # 7 times
_MAX_SCALE = 10.0
_MIN_PREFILL = 1e-3  # of a step per row, where a staircase says that rows cost nothing
_MAX_VECTORS = 32


class StepCost:
    """Seconds of a step's parts; forwards are positive, finite and never cheaper with more rows.

    Example:
        cost = StepCost.of(lambda n, context, rows: 0.009 + 0.0004 * rows, max_rows=64,
                           max_requests=8)
        cost.forward_s(1, 300, 16)[16] / cost.forward_s(1, 300, 16)[1]    # what 15 nodes cost
        cost.observe(num_requests=1, context=300, num_rows=4, num_prefill=0, times=times)
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        shape = table.seconds.shape
        self._scale = Steady(0.0)
        self._shared = np.zeros(shape[2])  # shape by rows alone: known at once in new contexts
        self._cells = np.zeros(shape)  # and what differs from it
        self._visits = np.zeros(shape)
        self._seen = np.full(shape, np.nan)  # the last log(observed / table) of a place
        self._known: list[int] = []  # the points of rows where steps have been
        corners = np.ravel_multi_index(tuple(np.indices((2, 2, 2)).reshape(3, 8)), shape)
        self._corners = np.asarray(corners)
        self._bias = 0.0
        self._prefill = PerUnit()
        self._asks: dict[str, PerUnit] = {}
        self._rest = Steady()
        self._lefts: NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self._fractions = np.zeros(0)
        self._vectors: dict[tuple[int, int, int], NDArray[np.float64]] = {}

    @classmethod
    def of(
        cls,
        curve: Curve,
        *,
        max_rows: int,
        max_requests: int,
        is_staircase: bool = False,
        row_multiple: int = 1,
    ) -> StepCost:
        """Costs that start as curve(num_requests, context, num_rows) seconds.

        The curve is also asked for fewer rows than requests. Raises ValueError if it is not
        positive and finite.
        """
        return cls(
            CostTable.of(
                curve,
                max_rows=max_rows,
                max_requests=max_requests,
                is_staircase=is_staircase,
                row_multiple=row_multiple,
            )
        )

    def forward_s(self, num_requests: int, context: int, max_rows: int) -> NDArray[np.float64]:
        """Seconds of a decode forward, packing to verdicts, by its rows: [max_rows + 1].

        Rows are roots and nodes, `context` the requests' mean tokens. Entries below `num_requests`
        equal that of `num_requests`. Read-only, and the same array until the next `observe`.
        """
        key = (num_requests, context, max_rows)
        found = self._vectors.get(key)
        if found is None:
            if len(self._vectors) >= _MAX_VECTORS:
                self._vectors.clear()
            found = self._vectors[key] = self._forward_s(num_requests, context, max_rows)
        return found

    def prefill_s(self, num_prefill: int) -> float:
        """Seconds that prefill rows add to a step."""
        if num_prefill <= 0:
            return 0.0
        learned = self._prefill.seconds(num_prefill)
        if learned is not None:
            return learned
        short = self.forward_s(1, CONTEXTS[0], 1 + num_prefill)
        return float(max(short[-1] - short[1], _MIN_PREFILL * num_prefill * short[1]))

    @property
    def rest_s(self) -> float:
        """Seconds of planning, committing and telling the drafters; 0 while never measured."""
        return self._rest.value

    def ask_s(self, drafter: str, num_asked: int) -> float:
        """Seconds of asking a drafter to draft for that many requests; 0 while never measured."""
        asks = self._asks.get(drafter)
        return 0.0 if asks is None or num_asked <= 0 else asks.seconds(num_asked) or 0.0

    def observe(
        self, *, num_requests: int, context: int, num_rows: int, num_prefill: int, times: StepTimes
    ) -> None:
        """Learn from a step. `num_rows` are roots and nodes, without prefill rows.

        A step with prefill rows tells what those add, and nothing of decoding. Times that are
        negative, not finite or longer than a day tell nothing.
        """
        if _is_time(times.rest_s):
            self._rest.observe(times.rest_s)
        for drafter, seconds in times.draft_s.items():
            num_asked = times.num_asked.get(drafter, 0)
            if num_asked > 0 and _is_time(seconds):
                self._asks.setdefault(drafter, PerUnit()).observe(num_asked, seconds)
        if not (_is_time(times.forward_s) and times.forward_s > 0):
            return
        if num_prefill > 0:
            decode = self.forward_s(max(num_requests, 1), context, max(num_rows, 1))[-1]
            self._prefill.observe(num_prefill, max(times.forward_s - float(decode), 0.0))
        elif num_requests > 0:
            self._refine(num_requests, context, max(num_rows, num_requests), times.forward_s)

    def as_json(self) -> dict[str, Any]:
        """The table as measured at start, without what was learned since."""
        return self.table.as_json()

    @classmethod
    def from_json(cls, value: Any) -> StepCost:
        """Costs that start from a table. Raises ValueError if `as_json` did not make it."""
        return cls(CostTable.from_json(value))

    def curve(self) -> dict[str, Any]:
        """What is known now, for people, ready for JSON; forwards where steps have been."""
        rows, table = self.table.rows, self.table
        visited = self._visits.sum(2) > 0
        visited[0, 0] = True
        forwards = []
        for at, context_at in np.argwhere(visited):
            num_requests, context = table.requests[at], CONTEXTS[context_at]
            vector = self.forward_s(num_requests, context, rows[-1])
            costs = {str(r): _milliseconds(vector[r]) for r in rows if r >= num_requests}
            forwards.append({"requests": num_requests, "context": context, "rows_ms": costs})
        return {
            "is_staircase": table.is_staircase,
            "scale": round(math.exp(self._scale.value), 4),
            "forwards": forwards,
            "prefill_64_ms": _milliseconds(self.prefill_s(64)),
            "rest_ms": _milliseconds(self.rest_s),
            "ask_1_ms": {name: _milliseconds(self.ask_s(name, 1)) for name in sorted(self._asks)},
        }

    def _forward_s(self, num_requests: int, context: int, max_rows: int) -> NDArray[np.float64]:
        at, part = place(self.table.requests, num_requests)
        context_at, context_part = place(CONTEXTS, context)
        weights = np.outer((1 - part, part), (1 - context_part, context_part)).ravel()  # [4]
        here = (slice(at, at + 2), slice(context_at, context_at + 2))
        seconds = weights @ self.table.seconds[here].reshape(4, -1)  # [points]
        shape = weights @ self._cells[here].reshape(4, -1) + self._shared
        points = seconds * np.exp(shape + self._scale.value)
        size = max(max_rows, num_requests) + 1
        self._grow(size)
        lefts = self._lefts[:size]
        vector = points[lefts] + self._fractions[:size] * np.diff(points)[lefts]
        np.maximum.accumulate(vector, out=vector)
        vector[:num_requests] = vector[num_requests]
        vector = vector[: max_rows + 1]
        vector.flags.writeable = False
        return vector

    def _grow(self, size: int) -> None:
        """Know the places of that many numbers of rows."""
        if len(self._lefts) < size:
            places = [self.table.row_place(rows) for rows in range(2 * size)]
            self._lefts = np.array([left for left, _ in places], dtype=np.intp)
            self._fractions = np.array([part for _, part in places])

    def _refine(self, num_requests: int, context: int, num_rows: int, seconds: float) -> None:
        """Learn from a forward of decode steps alone."""
        at, b = place(self.table.requests, num_requests)
        context_at, c = place(CONTEXTS, context)
        row_at, beyond = self.table.row_place(num_rows)
        r = min(beyond, 1.0)
        groups = ((1 - b) * (1 - c), (1 - b) * c, b * (1 - c), b * c)
        group = np.array(groups)
        weights = np.array([part * x for part in groups for x in (1 - r, r)])  # [8] corners
        num_points = len(self.table.rows)
        here = self._corners + ((at * len(CONTEXTS) + context_at) * num_points + row_at)

        first, second = (group @ self.table.seconds.ravel()[here].reshape(4, 2)).tolist()
        ratio = math.log(seconds / (first + beyond * (second - first)))
        ratio = min(max(ratio, -_MAX_SCALE), _MAX_SCALE)
        left, right = self._shared[row_at : row_at + 2].tolist()
        cells, all_visits = self._cells.ravel(), self._visits.ravel()  # views
        shape = float(weights @ cells[here]) + (1 - r) * left + r * right
        visits = float(weights @ all_visits[here])
        trust = visits / (visits + _HALF_TRUST)

        nearest = (at + round(b), context_at + round(c), row_at + round(r))
        explained = self._scale.value + shape
        residual = _agreed(ratio - explained, float(self._seen[nearest]) - explained)
        residual = min(max(residual, -_MAX_CHANGE), _MAX_CHANGE)
        self._seen[nearest] = ratio

        # What all places share is the scale's to explain. The bias follows residuals, so that what
        # a place takes of a change of scale while the scale lags, it gives back: innovations
        # against a running mean that starts and ends at zero add up to zero.
        step = (residual - self._bias) / (visits + _MIN_VISITS)
        self._bias += _BIAS_RATE * trust * (residual - self._bias)
        self._scale.observe(ratio - shape, _RATE * trust)
        own = step * (1 - _SHARED) / float(weights @ weights)
        cells[here] = np.minimum(np.maximum(cells[here] + own * weights, -_MAX_SHAPE), _MAX_SHAPE)
        common = step * _SHARED / ((1 - r) ** 2 + r**2)
        for point, value, part in ((row_at, left, 1 - r), (row_at + 1, right, r)):
            if point == nearest[2] or point in self._known:
                self._share(point, value + common * part)
        self._visits *= _MEMORY
        all_visits[here] += weights
        self._vectors.clear()

    def _share(self, point: int, shape: float) -> None:
        """Set the shape at a point for all requests and contexts.

        Points where no step has been lie between those where some were, or equal the last.
        """
        self._shared[point] = min(max(shape, -_MAX_SHAPE), _MAX_SHAPE)
        if len(self._known) < len(self._shared):
            if point not in self._known:
                self._known = sorted([*self._known, point])
            known = self._shared[self._known]
            self._shared = np.interp(np.arange(len(self._shared)), self._known, known)


class Steady:
    """A running estimate that follows what lasts and ignores what comes once.

    The median of the last five observations, smoothed once there are five. With a `start`, as if
    five had been equal to it.

    Example: after 1.0, 1.1, 50.0, 1.0 its `value` is 1.0.
    """

    def __init__(self, start: float | None = None) -> None:
        self._recent = deque([] if start is None else [start] * _WINDOW, maxlen=_WINDOW)
        self.value = start or 0.0

    def observe(self, value: float, rate: float = _RATE) -> None:
        """Take in one more; `rate` is how much of the way to the median to go."""
        is_filling = len(self._recent) < _WINDOW
        self._recent.append(value)
        median = sorted(self._recent)[(len(self._recent) - 1) // 2]
        self.value = median if is_filling else self.value + rate * (median - self.value)


class PerUnit:
    """Seconds of something that is done for several at once, per unit, by the number of units.

    Numbers fall in bins (1, 2, 3 to 4, 5 to 8, ...); an empty bin takes the nearest one's figure.

    Example: after `observe(4, 0.002)`, `seconds(16)` is 0.008.
    """

    def __init__(self) -> None:
        self._bins: dict[int, Steady] = {}

    def observe(self, count: int, seconds: float) -> None:
        """`seconds` were spent for `count` units, one or more."""
        self._bins.setdefault((count - 1).bit_length(), Steady()).observe(seconds / count)

    def seconds(self, count: int) -> float | None:
        """Seconds for `count` units, None while never measured."""
        if not self._bins:
            return None
        wanted = (count - 1).bit_length()
        nearest = min(self._bins, key=lambda index: (abs(index - wanted), index))
        return self._bins[nearest].value * count


def _agreed(now: float, before: float) -> float:
    """The lesser of two residuals, 0 where they differ in sign or there was none before."""
    if now > 0 and before > 0:
        return min(now, before)
    if now < 0 and before < 0:
        return max(now, before)
    return 0.0


def _is_time(seconds: float) -> bool:
    return 0 <= seconds <= MAX_SECONDS  # not NaN


def _milliseconds(seconds: float) -> float:
    return round(float(seconds) * 1e3, 4)
