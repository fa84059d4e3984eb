"""The simulator against what can be calculated: machines, true acceptance, the loop, the report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from specdec.commit import VerifiedStep
from specdec.composite import join
from specdec.controller import Controller, FixedBudget
from specdec.decision import StepTimes
from specdec.evals.simulation import population as populations
from specdec.evals.simulation.population import Kind, Phase, Population, VirtualRequest, true_token
from specdec.evals.simulation.report import at_work, best_fixed, fixed, render, report
from specdec.evals.simulation.simulated_drafter import Honesty, SimulatedDrafter
from specdec.evals.simulation.simulator import simulate
from specdec.evals.simulation.virtual_machine import (
    VirtualMachine,
    compute_bound,
    four_bit_gpu,
    memory_bound,
    mixture_of_experts,
    standard_machines,
)
from specdec.limits import DraftLimits
from specdec.plan import DecodeStep, StepPlan
from specdec.request import Request, TokenRecord
from specdec.tree import DraftTree

CERTAIN = (Kind(beta=0.0),)  # ease 1 everywhere: a drafter's quality is its chance
FLAT = VirtualMachine("flat", 1.0, lambda rows: 1.0)


def chain_of(chance: float, depth: int, **cost: float) -> Population:
    drafter = SimulatedDrafter("chain", quality=chance, max_depth=depth, **cost)  # type: ignore[arg-type]  # mixed keywords
    return Population("chain", (drafter,), CERTAIN)


def within(found: float, expected: float, deviation: float, count: int) -> bool:
    """Whether a mean of `count` draws is less than four standard errors away."""
    return abs(found - expected) < 4 * deviation / math.sqrt(count)


@pytest.mark.parametrize("machine", standard_machines(), ids=lambda machine: machine.name)
def test_a_machine_is_never_faster_with_more_rows(machine: VirtualMachine) -> None:
    curve = machine.curve(4, 512, 600)
    assert (np.diff(curve) >= 0).all()
    assert (curve[:5] == curve[4]).all()
    assert curve[4] < machine.forward_s(4, 1024, 4)


def test_machines_cross_over_where_they_should() -> None:
    def times(machine: VirtualMachine, rows: int) -> float:
        return machine.forward_s(1, 0, rows) / machine.forward_s(1, 0, 1)

    assert times(memory_bound(), 192) < 1.11 < 1.9 < times(memory_bound(), 384)
    assert times(four_bit_gpu(), 48) < 1.11 < 1.9 < times(four_bit_gpu(), 96)
    assert times(compute_bound(0.1), 11) == pytest.approx(2.0)
    early, late = (times(mixture_of_experts(), rows) for rows in (24, 48))
    assert early - 1 > 3 * (late - early)
    assert times(memory_bound(), 33) == times(memory_bound(), 48)  # a staircase


def test_drift_goes_by_tokens() -> None:
    machine = memory_bound()
    drifting = machine.becoming(machine.slower(2.0), 100, 300)
    at = [drifting.forward_s(1, 0, 1, n) / machine.forward_s(1, 0, 1) for n in (0, 99, 200, 300)]
    assert at == pytest.approx([1.0, 1.0, 1.5, 2.0])
    sudden = machine.becoming(compute_bound(), 100, 100)
    assert sudden.forward_s(1, 0, 64, 99) == machine.forward_s(1, 0, 64)
    assert sudden.forward_s(1, 0, 64, 100) == compute_bound().forward_s(1, 0, 64)


def test_noise_has_mean_one_and_outliers() -> None:
    noise = compute_bound().noisy(0.2, 0.02).noise
    factors = np.array([noise.factor(0, step) for step in range(4000)])
    usual = factors[factors < 10]
    assert within(usual.mean(), 1.0, 0.2, len(usual))
    assert within(float((factors > 10).mean()), 0.02, 0.14, len(factors))


def test_plain_decoding_gives_a_token_per_request_and_step() -> None:
    machine = VirtualMachine("line", 2.0, lambda rows: rows, kv_s=0.0, rest_s=0.5)
    result = simulate(machine, chain_of(0.9, 4).at(3, 300), fixed(0))
    assert result.throughput == pytest.approx(3 / (2.0 * 3 + 0.5))
    assert result.plain_throughput == result.throughput
    assert result.overhead() == 1.0
    assert (result.num_steps, result.nodes.sum(), result.asked.sum()) == (100, 0, 0)


@pytest.mark.parametrize(("chance", "depth"), [(0.3, 4), (0.8, 4), (0.95, 16), (1.0, 8)])
def test_a_chain_is_accepted_as_far_as_a_geometric_law_says(chance: float, depth: int) -> None:
    served = chain_of(chance, depth)
    result = simulate(FLAT, replace(served, length=4000).at(8, 40_000), fixed(depth))
    lengths = np.arange(depth + 1)
    law = chance**lengths * np.where(lengths < depth, 1 - chance, 1.0)
    mean = float(law @ (lengths + 1))
    deviation = math.sqrt(float(law @ (lengths + 1 - mean) ** 2))
    num_cut = 8 + 2 * 40_000 // 4000  # steps cut short by an output's end
    found = float(result.tokens.sum() / result.requests.sum())
    steps = int(result.requests.sum())
    slack = num_cut * depth / steps
    assert abs(found - mean) < 4 * deviation / math.sqrt(steps) + slack
    assert mean > 1.3


def test_a_tree_is_accepted_as_its_levels_say() -> None:
    """Two children per node with chances 0.5 and 0.4 * 0.5: a level holds with 0.7."""
    drafter = SimulatedDrafter("tree", quality=0.5, width=2, max_depth=2)
    served = Population("tree", (drafter,), CERTAIN, length=4000)
    result = simulate(FLAT, served.at(8, 40_000), fixed(6))
    assert (result.nodes == 6 * result.requests).all()
    steps = int(result.requests.sum())
    assert within(float(result.tokens.sum()) / steps, 1 + 0.7 + 0.49, 0.9, steps)


def advance(virtual: VirtualRequest, count: int) -> None:
    left = virtual.request.max_output - len(virtual.request.output)
    for _ in range(min(count, left)):
        token_id = true_token(len(virtual.request.output))
        virtual.request.append(TokenRecord(token_id, ("target",), 1, 0), ())


def judged(served: Population, usefulness: float = 1.0) -> list[tuple[float, bool, int]]:
    """Score, rightness and number of sources of nodes whose parents are right, at every root."""
    found = []
    for number in range(40):
        virtual = VirtualRequest(served, number, seed=0)
        while not virtual.request.is_finished:
            drafters = range(len(served.drafters))
            step = DecodeStep(virtual.request, 64)
            tree = join(step, [virtual.draft(d, 8, 64, usefulness) for d in drafters])
            path = [0, *virtual.verify(tree).path]
            found += [
                (tree.scores[node], node in path, len(tree.sources[node]))
                for node in range(1, tree.num_nodes)
                if tree.parents[node] in path
            ]
            advance(virtual, 8)
    return found


@pytest.mark.parametrize(
    ("honesty", "truth"),
    [
        ("calibrated", lambda score: score),
        ("over-confident", lambda score: score / 2),
        ("under-confident", lambda score: math.sqrt(score)),
        ("uninformative", lambda score: 0.5),  # the mean ease
    ],
)
def test_scores_relate_to_the_truth_as_the_process_says(
    honesty: Honesty, truth: Callable[[float], float]
) -> None:
    by_score = defaultdict(list)
    for score, is_right, _ in judged(populations.chat(honesty)):
        by_score[int(10 * score)].append((truth(score), is_right))
    assert by_score
    for pairs in by_score.values():
        expected, right = np.array(pairs, dtype=float).T
        assert within(right.mean(), expected.mean(), 0.5, len(pairs))


def test_of_siblings_at_most_one_is_right_and_the_second_as_often_as_it_says() -> None:
    drafter = SimulatedDrafter("tree", quality=0.5, width=3, max_depth=3, decay=0.8)
    served = Population("tree", (drafter,), CERTAIN)
    found = judged(served)
    for chance in (0.5, 0.2, 0.12, 0.4, 0.16, 0.096):  # by rank, at levels 1 and 2
        own = [right for score, right, _ in found if score == pytest.approx(chance)]
        assert len(own) > 100
        assert within(float(np.mean(own)), chance, 0.5, len(own))


def test_useless_guesses_keep_their_scores() -> None:
    sure, useless = judged(populations.copying()), judged(populations.copying(), usefulness=0.0)
    assert np.mean([right for _, right, _ in sure]) > 0.95
    assert not any(right for _, right, _ in useless)
    assert min(score for score, _, _ in useless) > 0.5


def test_drafters_that_agree_are_right_more_often() -> None:
    by_number: dict[int, list[bool]] = defaultdict(list)
    for _, is_right, num_sources in judged(populations.several()):
        by_number[num_sources].append(is_right)
    assert np.mean(by_number[2]) > np.mean(by_number[1]) + 0.2
    assert not all(by_number[2])  # they err together too


@pytest.mark.parametrize("served", populations.standard(), ids=lambda served: served.name)
def test_guesses_do_not_depend_on_who_asked_before(served: Population) -> None:
    """One request is asked at every position and for all depths, the other once."""
    often, once = (VirtualRequest(served, 3, seed=1) for _ in range(2))
    for depth in (5, 2, 8, 5) * 4:
        often.draft(0, depth, 6, 1.0)
        advance(often, 1)
    advance(once, 16)
    assert often.draft(0, 5, 9, 1.0) == once.draft(0, 5, 9, 1.0)
    deep, flat = once.draft(0, 6, 64, 1.0), once.draft(0, 2, 64, 1.0)
    assert set(zip(flat.token_ids, flat.depths, strict=True)) <= set(
        zip(deep.token_ids, deep.depths, strict=True)
    )
    other = VirtualRequest(served, 4, seed=1)
    assert other.request.max_output != once.request.max_output


class Recorder(Controller):
    """Asks one drafter for every second request and verifies the first node that it guesses."""

    def __init__(self, limits: DraftLimits) -> None:
        super().__init__(limits.node_budget)
        self.own = limits
        self.inner = FixedBudget(1)
        self.decisions = self.inner.decisions
        self.calls: list[str] = []
        self.depths: list[int] = []
        self.released: list[str] = []
        self.times: list[StepTimes] = []

    def limits(self, requests: Iterable[Request]) -> dict[str, DraftLimits]:
        self.calls.append("limits")
        ids = [request.request_id for request in requests]
        return dict.fromkeys(ids[::2], self.own)

    def choose(self, plan: StepPlan, candidates: Sequence[DraftTree]) -> list[DraftTree]:
        self.calls.append("choose")
        for step, tree in zip(plan.decode_steps, candidates, strict=True):
            self.depths.append(max(tree.depths))
            assert tree.num_nodes - 1 <= step.node_budget
            assert all(names in (("heads",), ("target",)) for names in tree.sources)
        return self.inner.choose(plan, [self._first(tree) for tree in candidates])

    def _first(self, tree: DraftTree) -> DraftTree:
        cut = min(2, tree.num_nodes)
        return DraftTree(
            tree.token_ids[:cut], tree.parents[:cut], tree.scores[:cut], tree.sources[:cut]
        )

    def observe(self, verified: Sequence[VerifiedStep], times: StepTimes) -> None:
        self.calls.append("observe")
        self.times.append(times)
        for item in verified:
            last = item.step.request.token_ids[-1]
            assert item.step.request.is_finished or last == item.verdict.token_ids[-1]

    def release(self, request: Request) -> None:
        self.calls.append("release")
        self.released.append(request.request_id)


COSTLY = replace(populations.HEADS, level_s=1e-3)
LIMITS = DraftLimits(12, 5, {"heads": 2})
TWO = Population("two", (populations.SUFFIX, COSTLY), (Kind(),), length=12)


@pytest.mark.parametrize(("max_depth", "level"), [(5, 2), (2, 5)])
def test_the_controller_is_called_as_the_engine_calls_it(max_depth: int, level: int) -> None:
    recorder = Recorder(DraftLimits(12, max_depth, {"heads": level}))
    result = simulate(
        compute_bound(),
        TWO.through(Phase(4, num_steps=20), Phase(1, num_steps=5)),
        lambda machine, population: recorder,
    )
    steps = [call for call in recorder.calls if call != "release"]
    assert steps == ["limits", "choose", "observe"] * 25
    assert len(recorder.released) == len(set(recorder.released)) > 6
    assert max(recorder.depths) == 2
    assert [times.num_asked for times in recorder.times] == [{"heads": 2}] * 20 + [{"heads": 1}] * 5
    assert recorder.times[0].draft_s == {"heads": COSTLY.seconds(2, 2)}
    assert result.asked.tolist() == [2] * 20 + [1] * 5
    assert (result.nodes == result.asked).all()
    assert (result.rows == result.requests + result.nodes).all()
    assert result.seconds.tolist() == pytest.approx([t.total_s for t in recorder.times])


def test_noise_is_measured_but_not_paid() -> None:
    machine = compute_bound().noisy(0.2, 0.02)
    recorder = Recorder(LIMITS)
    served = TWO.through(Phase(2, num_steps=30))
    noisy = simulate(machine, served, lambda machine, population: recorder)
    calm = simulate(compute_bound(), served, lambda machine, population: Recorder(LIMITS))
    assert noisy.seconds.tolist() == calm.seconds.tolist()
    for step, (times, seconds) in enumerate(zip(recorder.times, calm.seconds, strict=True)):
        factor = machine.noise.factor(0, step)
        assert times.total_s == pytest.approx(factor * seconds)
        assert times.rest_s == pytest.approx(factor * machine.rest_s)


def test_phases_change_load_and_usefulness() -> None:
    served = chain_of(1.0, 3).through(
        Phase(2, num_tokens=80), Phase(5, num_steps=7, usefulness=0.0), Phase(1, num_steps=4)
    )
    result = simulate(FLAT, served, fixed(3))
    assert [result.phase(index) for index in range(3)] == [(0, 10), (10, 17), (17, 21)]
    assert result.requests.tolist() == [2] * 10 + [5] * 7 + [1] * 4
    assert result.tokens.tolist() == [8] * 10 + [5] * 7 + [4] * 4
    assert (result.rate(0, 10), result.rate(10, 17)) == (8.0, 5.0)


def test_every_policy_serves_the_same_requests() -> None:
    """To the end of one request of its own, its whole output is the same number of tokens."""
    served = replace(populations.mixed(), length=40)
    lengths = [VirtualRequest(served, number, seed=5).request.max_output for number in range(6)]
    total = served.at(1, sum(lengths))
    for budget in (0, 3, 24):
        result = simulate(FLAT, total, fixed(budget), seed=5)
        ends = np.cumsum(lengths)
        assert set(ends) <= set(np.cumsum(result.tokens))


def test_the_best_fixed_budget_is_found() -> None:
    """Four requests, rows at 10 % of a step: (1 - 0.8^(k+1)) / 0.2 / (1.3 + 0.4 k) is best at 3."""
    machine = replace(compute_bound(0.1), kv_s=0.0, rest_s=0.0)
    served = replace(chain_of(0.8, 64), length=4000).at(4, 20_000)
    found = best_fixed(machine, served, node_budgets=(0, 1, 2, 3, 8, 32, 64))
    assert found.best == 3
    assert found.throughput == pytest.approx(100 * 4 * 2.952 / 2.5, rel=0.03)  # six deviations
    assert found.throughputs[0] < found.throughput > found.throughputs[8]
    assert found.throughput == found.result.throughput


def test_a_report_has_a_row_per_case() -> None:
    made = report(
        machines=(memory_bound(),), populations=(populations.copying(),), batch_sizes=(2,)
    )
    (row,) = made["rows"]
    assert (row["machine"], row["population"], row["batch"]) == ("gpu", "copying", 2)
    assert row["adaptive_per_plain"] == pytest.approx(row["adaptive"] / row["plain"], abs=1e-3)
    assert row["best_fixed"] == max(row["fixed"].values())
    text = render(made)
    assert "copying" in text
    assert f"{row['adaptive_per_best']:.3f}" in text
    assert at_work(memory_bound(), populations.useless(), 64).phases[0].num_tokens == 400 * 64
