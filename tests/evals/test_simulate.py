"""`specdec bench simulate`: it prints the simulation's report, and a smaller one if quick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from specdec.evals import bench_commands
from specdec.evals.simulation import report as simulation_report


def test_simulate_prints_what_the_simulation_reports(capsys: pytest.CaptureFixture[str]) -> None:
    numbers: list[list[int]] = []

    def report(**cases: Sequence[object]) -> dict[str, Any]:
        numbers.append([len(some) for some in cases.values()])
        return {"rows": len(numbers)}

    with (
        patch.object(simulation_report, "report", report),
        patch.object(simulation_report, "render", lambda found: f"{found['rows']} row"),
    ):
        bench_commands.simulate()
        bench_commands.simulate(quick=True, as_json=True)
    assert capsys.readouterr().out == '1 row\n{"rows": 2}\n'
    assert all(0 < few < all_ for all_, few in zip(*numbers, strict=True))
