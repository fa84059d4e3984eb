"""The table of forward costs: its grid, and what is refused to be one"""

import json
import math
from typing import Any

import pytest

from specdec.cost_table import CostTable, place, row_points
from specdec.step_cost import StepCost

TABLE = CostTable.of(
    lambda n, context, rows: 9e-3 + 4e-4 * rows + 1e-8 * n * context,
    max_rows=300,
    max_requests=16,
    is_staircase=True,
    row_multiple=64,
)


def test_row_points() -> None:
    def points(max_rows: int, **settings: Any) -> tuple[int, ...]:
        return row_points(max_rows, **{"is_staircase": False, "row_multiple": 1, **settings})

    assert points(1) == (1, 2)
    assert points(20, is_staircase=True) == (1, 2, 4, 8, 12, 16, 24)
    assert points(20) == (1, 2, 4, 8, 12, 16, 17, 20)
    assert points(1000)[-4:] == (192, 256, 512, 1024)
    pinned = points(500, is_staircase=True, row_multiple=64)
    assert pinned == (64, 128, 192, 256, 320, 512)


def test_places_lie_on_the_axis() -> None:
    assert [place((1, 2, 4), value) for value in (0, 1, 3, 4, 9)] == [
        (0, 0.0),
        (0, 0.0),
        (1, 0.5),
        (1, 1.0),
        (1, 1.0),
    ]


def test_a_table_survives_json() -> None:
    again = StepCost.from_json(json.loads(json.dumps(StepCost(TABLE).as_json())))
    assert (again.forward_s(3, 900, 300) == StepCost(TABLE).forward_s(3, 900, 300)).all()


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "much"},
        {"seconds": [[[1.0]]]},
        {"rows": [1, 1]},
        {"rows": 7},
        {"contexts": [1, 2]},
        {"row_multiple": 0},
        {"seconds": (-TABLE.seconds).tolist()},
        {"seconds": (TABLE.seconds * math.nan).tolist()},
        {"seconds": TABLE.seconds[:, :, ::-1].tolist()},
    ],
)
def test_what_is_no_table_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # as numpy's and int's own words
        CostTable.from_json({**TABLE.as_json(), **change})
