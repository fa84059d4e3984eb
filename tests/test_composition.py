"""Composition: a trained drafter stays where its pass pays, and budgets follow what rows cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec import machine_cache
from specdec.composition import BUDGETS, CONTEXT, SURE, best_budget, compose, gain, pass_s
from specdec.drafting import Drafter
from specdec.limits import MAX_NODE_BUDGET
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.step_cost import StepCost
from specdec.tree import DraftTree
from specdec.verification import Verdict

ROW_S = st.floats(0.0, 5e-3)


def cost_of(first_s: float, row_s: float) -> StepCost:
    def curve(num_requests: int, context: int, num_rows: int) -> float:
        return first_s + row_s * (num_rows - 1)

    return StepCost.of(curve, max_rows=256, max_requests=2)


class Free(Drafter):
    name = "free"

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        return [DraftTree.root_only(step.root) for step in steps]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_cache, "cache_folder", lambda: tmp_path)


class Trained(Free):
    """Takes `seconds` of virtual time to ask, the first time a hundred times as long."""

    name = "trained"
    needs_hidden = True
    worths = (0.5, 0.2, 0.1)

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.now, self.calls = seconds, 0.0, list[str]()

    def admit(self, request: Request) -> None:
        self.calls.append("admit")

    def observe(self, request: Request, verdict: Verdict, hidden: Tensor | None) -> None:
        assert hidden is not None and hidden.shape == (1, 8)
        self.calls.append("observe")

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        self.now += self.seconds * (1 if "draft" in self.calls else 100)
        self.calls.append("draft")
        return super().draft(steps)

    def release(self, request: Request) -> None:
        self.calls.append("release")


def composed(drafter: Trained, cost: StepCost | None, **settings: Any) -> tuple[str, int, str]:
    given = {"is_open": True, "node_budget": None, "identity": {"model": "toy"}, **settings}
    found = compose([Free(), drafter], cost, hidden_size=8, clock=lambda: drafter.now, **given)
    return found.names, found.node_budget, found.reason


def test_a_pass_that_pays_stays() -> None:
    """Three nodes: 1.8 tokens for (10 + 3 + 2) ms against 10, two of them: 1.7 for 14."""
    names, budget, reason = composed(Trained(2e-3), cost_of(10e-3, 1e-3))
    assert names == "free,trained"
    assert reason == f"drafter free,trained, trained gives 1.21x; at most {budget} nodes a step"


def test_what_a_pass_is_of_a_forward_is_measured_once() -> None:
    """A start in a busy moment decides as the one before did, whatever its clock says."""
    first = composed(Trained(2e-3), cost_of(10e-3, 1e-3))
    busy = Trained(9e-3)
    assert composed(busy, cost_of(30e-3, 3e-3)) == first
    assert busy.calls == []
    other = composed(busy, cost_of(10e-3, 1e-3), identity={"model": "another"})
    assert other[0] == "free" and busy.calls


@pytest.mark.parametrize("kept", ["1", -1.0, 0.0, None, [1.0]])
def test_a_kept_pass_that_is_none_is_measured_again(
    kept: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_cache, "load", lambda kind, identity: kept)
    drafter = Trained(2e-3)
    assert "gives 1.21x" in composed(drafter, cost_of(10e-3, 1e-3))[2]
    assert drafter.calls


def test_a_pass_that_does_not_pay_goes() -> None:
    names, _, reason = composed(Trained(8e-3), cost_of(10e-3, 1e-3))
    assert names == "free"
    assert reason.startswith("drafter free, trained would give 0.86x; ")


def test_a_gain_within_the_errors_of_estimates_is_none() -> None:
    assert composed(Trained(4.1e-3), cost_of(10e-3, 1e-3))[0] == "free"  # 1.056x


def test_what_was_asked_for_stays() -> None:
    found = composed(Trained(1.0), cost_of(10e-3, 1e-3), is_open=False, node_budget=3)
    assert found == ("free,trained", 3, "")


def test_nothing_is_measured_without_costs() -> None:
    drafter = Trained()
    assert composed(drafter, None) == ("free", 16, "drafter free; at most 16 nodes a step")
    assert drafter.calls == []
    assert composed(drafter, None, node_budget=3) == ("free", 3, "drafter free")


def test_a_pass_is_timed_as_a_request_asks_for_it() -> None:
    drafter = Trained(3e-3)
    assert pass_s(drafter, 8, lambda: drafter.now) == pytest.approx(3e-3)
    assert drafter.calls == ["admit", "observe", *6 * ["draft"], "release"]


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=16), ROW_S, ROW_S)
def test_the_gain_is_that_of_the_best_number_of_nodes(
    worths: list[float], row_s: float, own_s: float
) -> None:
    each = [
        (1 + math.fsum(worths[:n])) * 5e-3 / (5e-3 + n * row_s + own_s)
        for n in range(1, len(worths) + 1)
    ]
    cost = cost_of(5e-3, row_s)
    share = own_s / float(cost.forward_s(1, CONTEXT, 1)[1])
    assert gain(worths, cost, share) == pytest.approx(max(each), rel=1e-6)


@given(ROW_S)
def test_the_budget_is_the_best_for_guesses_that_nearly_all_come_true(row_s: float) -> None:
    def speed(budget: int) -> float:
        return math.fsum(SURE**depth for depth in range(budget + 1)) / (5e-3 + budget * row_s)

    found = best_budget(cost_of(5e-3, row_s))
    assert found in BUDGETS
    assert speed(found) == pytest.approx(max(map(speed, BUDGETS)), rel=1e-6)


def test_budgets_reach_from_few_to_nearly_all() -> None:
    assert BUDGETS == (4, 8, 16, 32, 64, 128)
    assert BUDGETS[-1] <= MAX_NODE_BUDGET
    assert best_budget(cost_of(5e-3, 0.0)) == 128
    assert best_budget(cost_of(5e-3, 5e-3)) == 4
