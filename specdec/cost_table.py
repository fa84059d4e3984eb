"""CostTable: seconds of a decode forward on a grid of requests, contexts and rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.cuda_graphs import ROW_BUCKETS, row_bucket

# Tokens per request, its mean over a step. Shorter contexts cost as the first one does.
CONTEXTS = (128, 512, 2048, 8192, 32768, 131072)
_CPU_POINTS = (17, 20, 28, 33, 36, 40, 56, 80)
MIN_SECONDS, MAX_SECONDS = 1e-9, 1e5  # of one forward: what lies outside is no measurement

Curve = Callable[[int, int, int], float]  # num_requests, context, num_rows -> seconds


@dataclass(frozen=True, eq=False)
class CostTable:
    """Seconds at the grid's points, non-decreasing in rows; linear in between on all three axes.

    seconds: [len(requests), len(CONTEXTS), len(rows)], each axis of two points or more.

    A GPU pads rows to buckets, so there the cost is a staircase: that of `row_bucket(rows,
    row_multiple)`. Above the last point it goes on as between the last two.

    Example: `CostTable.of(lambda n, context, rows: 0.01 + 0.001 * rows, max_rows=64,
    max_requests=8)`. Raises ValueError for what is not such a table.
    """

    seconds: NDArray[np.float64]
    rows: tuple[int, ...]
    requests: tuple[int, ...]
    is_staircase: bool = False
    row_multiple: int = 1

    def __post_init__(self) -> None:
        if self.seconds.shape != (len(self.requests), len(CONTEXTS), len(self.rows)):
            raise ValueError(f"costs of shape {self.seconds.shape} do not fit their axes")
        for axis in (self.rows, self.requests):
            if len(axis) < 2 or axis[0] < 1 or list(axis) != sorted(set(axis)):
                raise ValueError(f"{axis} is no ascending axis of two points or more")
        if self.row_multiple < 1:
            raise ValueError(f"rows in multiples of {self.row_multiple}")
        if not ((self.seconds >= MIN_SECONDS) & (self.seconds <= MAX_SECONDS)).all():  # not NaN
            raise ValueError(f"costs must lie between {MIN_SECONDS} and {MAX_SECONDS} s")
        if (np.diff(self.seconds) < 0).any():
            raise ValueError("costs must not fall with more rows")

    @classmethod
    def of(
        cls,
        curve: Curve,
        *,
        max_rows: int,
        max_requests: int,
        is_staircase: bool = False,
        row_multiple: int = 1,
    ) -> CostTable:
        """The table of a curve, which is also asked for fewer rows than requests.

        Where it falls with more rows it is taken to be level.
        """
        rows = row_points(max_rows, is_staircase=is_staircase, row_multiple=row_multiple)
        requests = [1, 2]
        while requests[-1] < max_requests:
            requests.append(2 * requests[-1])
        seconds = [[[curve(n, c, r) for r in rows] for c in CONTEXTS] for n in requests]
        rising = np.maximum.accumulate(np.array(seconds, float), axis=2)
        return cls(rising, rows, tuple(requests), is_staircase, row_multiple)

    def scaled(self, factor: float) -> CostTable:
        """The table of a machine that takes `factor` times as long."""
        seconds = np.clip(self.seconds * factor, MIN_SECONDS, MAX_SECONDS)
        return replace(self, seconds=seconds)

    def row_place(self, num_rows: int) -> tuple[int, float]:
        """The point left of `num_rows`, and how far it is to the next: above 1 behind the last."""
        rows = self.effective_rows(num_rows)
        left = min(max(bisect_right(self.rows, rows) - 1, 0), len(self.rows) - 2)
        first, second = self.rows[left : left + 2]
        return left, max((rows - first) / (second - first), 0.0)

    def effective_rows(self, num_rows: int) -> int:
        """Rows that are computed where `num_rows` are asked for."""
        return row_bucket(num_rows, self.row_multiple) if self.is_staircase else max(num_rows, 1)

    def as_json(self) -> dict[str, Any]:
        """All of it, for `from_json`."""
        return {
            "contexts": list(CONTEXTS),
            "requests": list(self.requests),
            "rows": list(self.rows),
            "is_staircase": self.is_staircase,
            "row_multiple": self.row_multiple,
            "seconds": self.seconds.tolist(),
        }

    @classmethod
    def from_json(cls, value: Any) -> CostTable:
        """The table that `as_json` described. Raises ValueError for anything else."""
        try:
            if tuple(value["contexts"]) != CONTEXTS:
                raise ValueError("costs at other contexts")
            return cls(
                np.array(value["seconds"], float),
                tuple(int(rows) for rows in value["rows"]),
                tuple(int(requests) for requests in value["requests"]),
                bool(value["is_staircase"]),
                int(value["row_multiple"]),
            )
        except (KeyError, TypeError, IndexError, OverflowError) as error:
            raise ValueError(f"not a table of costs: {error!r}") from None


def row_points(max_rows: int, *, is_staircase: bool, row_multiple: int) -> tuple[int, ...]:
    """Numbers of rows to know the cost of: row buckets, and doublings of the largest above them.

    A CPU's forward has steps of its own between them, so there more points are told apart.

    Example: `row_points(20, is_staircase=True, row_multiple=1) == (1, 2, 4, 8, 12, 16, 24)`.
    """
    points = [bucket for bucket in ROW_BUCKETS if bucket % row_multiple == 0]
    if not is_staircase:
        points = sorted({*points, *_CPU_POINTS})
    if is_staircase and max_rows > ROW_BUCKETS[-1]:
        # Steps beyond the buckets are not recorded but launched, which is a stair of its own.
        points.append(row_bucket(ROW_BUCKETS[-1] + 1, row_multiple))
    double = 2 * ROW_BUCKETS[-1]
    while points[-1] < max_rows:
        points.append(double)
        double *= 2
    num_needed = next(index for index, rows in enumerate(points) if rows >= max_rows) + 1
    return tuple(points[: max(num_needed, 2)])


def place(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The point of an axis left of a value, and how far it is to the next, from 0 to 1.

    Example: `place((1, 2, 4), 3) == (1, 0.5)`; values outside count as the nearest end.
    """
    left = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    first, second = axis[left : left + 2]
    return left, min(max((value - first) / (second - first), 0.0), 1.0)
