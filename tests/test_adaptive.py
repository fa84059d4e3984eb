"""AdaptiveController: what pays is drafted and verified, what does not is not, and it says why."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise

import pytest

from specdec.asking import FIRST_PROBE, LAST_PROBE
from specdec.decision import Reason
from specdec.limits import SpeculationLimits
from specdec.plan import DecodeStep
from specdec.tree import DraftTree
from tests.toy_control import Control, adaptive, chain, cost, request


def good(name: str, length: int = 8) -> partial[DraftTree]:
    return partial(chain, source=name, length=length, right=length)


def bad(name: str, length: int = 8) -> partial[DraftTree]:
    return partial(chain, source=name, length=length)


def test_free_rows_are_filled_and_dear_ones_left_empty() -> None:
    free = Control(adaptive(cost(), "a"), [request()], {"a": good("a")})
    assert [d.num_nodes for d in free.run(20)] == [8] * 20
    dear = Control(adaptive(cost(0.02), "a"), [request()], {"a": good("a")}, row_s=0.02)
    decisions = dear.run(20)  # a row costs two plain steps, and brings at most one token
    assert [d.num_nodes for d in decisions] == [0] * 20
    assert decisions[0].reason is Reason.NO_GAIN


def test_a_staircase_is_filled_to_the_edge_of_a_step() -> None:
    """Rows 5 to 8 cost as much as the fifth; the chain is worth going past the first edge."""

    def seconds(requests: int, context: int, rows: int) -> float:
        return 0.01 * (1.0 + 0.6 * (rows > 4) + 3.0 * (rows > 8))

    from specdec.step_cost import StepCost

    costs = StepCost.of(seconds, max_rows=64, max_requests=2, is_staircase=True)
    control = Control(adaptive(costs, "a"), [request()], {"a": good("a", 14)})
    for _ in range(40):
        control.step()
        costs._vectors.clear()
    assert control.step().num_rows == 8


def test_useless_drafts_are_given_up_and_probed_less_and_less() -> None:
    control = Control(adaptive(cost(0.0005), "a"), [request()], {"a": bad("a")}, row_s=0.0005)
    control.ask_s = {"a": 0.001}
    decisions = control.run(600)
    assert sum(d.num_nodes for d in decisions[20:]) <= 2
    asked = [index for index, names in enumerate(control.asked) if names]
    gaps = [b - a for a, b in pairwise(asked) if b - a > 1]
    assert gaps[0] >= FIRST_PROBE - 1 and gaps[-1] <= LAST_PROBE + 1
    assert sorted(gaps) == gaps  # back-off
    assert len(asked) < 60
    assert {d.reason for d in decisions[100:]} <= {Reason.OFF, Reason.NO_GAIN, Reason.PROBE}


def test_drafts_that_become_good_are_taken_up_again() -> None:
    control = Control(adaptive(cost(0.0005), "a"), [request()], {"a": bad("a")}, row_s=0.0005)
    control.ask_s = {"a": 0.001}
    control.run(400)
    control.drafters = {"a": good("a")}
    decisions = control.run(300)
    on = next(i for i, d in enumerate(decisions) if d.num_nodes >= 6)
    assert on < 200
    assert all(d.num_nodes >= 6 for d in decisions[on + 10 :])


def test_drafts_that_become_useless_are_dropped_within_twenty_steps() -> None:
    control = Control(adaptive(cost(0.0005), "a"), [request()], {"a": good("a")}, row_s=0.0005)
    control.ask_s = {"a": 0.001}
    assert all(d.num_nodes == 8 for d in control.run(100)[5:])
    control.drafters = {"a": bad("a")}
    decisions = control.run(200)
    assert sum(d.num_nodes for d in decisions[20:]) <= 4


def test_a_dear_drafter_is_dropped_beside_a_cheap_one_that_is_as_good() -> None:
    """Equal guesses are the cheap one's: for them the dear one need not be asked."""

    def both(step: DecodeStep) -> DraftTree:
        tree = chain(step, "cheap", 6, right=6)
        return DraftTree(tree.token_ids, tree.parents, tree.scores, _both(tree))

    control = Control(adaptive(cost(), "dear", "cheap"), [request()], {"dear": both, "cheap": both})
    control.ask_s = {"dear": 0.004, "cheap": 1e-5}
    control.run(60)
    late = control.asked[-20:]
    assert all("cheap" in names for names in late)
    assert sum("dear" in names for names in late) <= 2


def _both(tree: DraftTree) -> tuple[tuple[str, ...], ...]:
    return (tree.sources[0], *[("dear", "cheap")] * (tree.num_nodes - 1))


def test_a_sequential_drafter_goes_as_deep_as_pays() -> None:
    def half(step: DecodeStep) -> DraftTree:  # level 1 and 2 are always right, the rest never
        depth = 8 if step.levels is None else min(8, step.levels["a"])
        return chain(step, "a", depth, right=2)

    control = Control(adaptive(cost(), "a", sequential=["a"]), [request()], {"a": half})
    control.level_s = {"a": 0.001}
    control.run(100)
    depths = []
    for _ in range(32):
        control.step()
        levels = control.limits[control.requests[0].request_id].levels
        assert levels is not None
        depths.append(levels["a"])
    assert depths.count(2) >= 28 and max(depths) == 3  # now and then one level more, to see


@pytest.mark.parametrize("is_adaptive", [True, False])
def test_limits_of_a_request_hold(is_adaptive: bool) -> None:
    from specdec.controller import FixedBudget

    requests = [
        request(),
        request(SpeculationLimits(max_nodes=3)),
        request(SpeculationLimits(max_depth=2)),
        request(SpeculationLimits(drafters=("b",))),
        request(SpeculationLimits(drafters=("unknown",))),
        request(SpeculationLimits(max_nodes=0)),
        request(SpeculationLimits(max_nodes=99)),
    ]
    control = Control(
        adaptive(cost(), "a", "b") if is_adaptive else FixedBudget(16),
        requests,
        {"a": good("a", 20), "b": good("b", 5)},
    )
    for _ in range(30):
        control.step()
        sizes = [tree.num_nodes - 1 for tree in control.trees]
        assert sizes[1:6] == [3, 2, 5, 0, 0]
        assert control.trees[3].sources[1:] == (("b",),) * 5
    assert sizes[0] == sizes[6]  # b answers last in this loop


def test_the_room_of_a_step_is_shared_by_worth() -> None:
    requests = [request() for _ in range(4)]
    control = Control(adaptive(cost(), "a"), requests, {"a": good("a", 12)}, node_room=10)
    for decision in control.run(20):
        assert decision.num_nodes == 10


def test_the_latency_weight_serves_slow_streams_too() -> None:
    """Room for eight nodes: throughput gives all to the sure chain, fairness shares them."""

    def draft(step: DecodeStep) -> DraftTree:
        is_sure = step.request is requests[0]
        return chain(step, "a", 8, right=8, score=0.95 if is_sure else 0.45)

    shares = {}
    for weight in (0.0, 0.5, 1.0):
        requests = [request(), request()]
        controller = adaptive(cost(), "a", latency_weight=weight)
        control = Control(controller, requests, {"a": draft}, node_room=8)
        control.step()
        shares[weight] = [tree.num_nodes - 1 for tree in control.trees]
    assert shares[0.0] == [8, 0]  # 0.95^8 is more than 0.45
    assert shares[0.0][1] < shares[0.5][1] <= shares[1.0][1]


def test_neighbours_of_every_kind_are_told_apart() -> None:
    """A request whose drafts fail is let be, while its neighbour's go on."""

    def draft(step: DecodeStep) -> DraftTree:
        return chain(step, "a", 8, right=8 if step.request is requests[0] else 0, score=0.5)

    requests = [request(), request()]
    control = Control(adaptive(cost(0.0005), "a"), requests, {"a": draft}, row_s=0.0005)
    control.ask_s = {"a": 0.0005}
    control.run(60)
    sizes = []
    for _ in range(20):
        control.step()
        sizes.append([tree.num_nodes - 1 for tree in control.trees])
    assert all(first == 8 for first, _ in sizes)
    assert sum(second for _, second in sizes) <= 2


def test_decisions_say_what_was_expected_and_what_came() -> None:
    control = Control(adaptive(cost(0.001), "a"), [request()], {"a": good("a", 4)}, row_s=0.001)
    decision = control.run(50)[-1]
    assert decision.reason is Reason.SPECULATE
    assert (decision.num_candidates, decision.num_nodes, decision.num_rows) == (4, 4, 5)
    assert decision.observed_tokens == 5 and decision.predicted_tokens == pytest.approx(5, abs=0.3)
    assert decision.plain_s == pytest.approx(0.01, rel=0.01)
    assert decision.observed_gain == pytest.approx(5 / 1.4, rel=0.02)
    assert decision.predicted_gain == pytest.approx(decision.observed_gain, rel=0.1)


def test_everything_is_explained_and_counted() -> None:
    controller = adaptive(cost(0.0005), "a")
    control = Control(controller, [request()], {"a": bad("a")}, row_s=0.0005)
    control.run(300)
    told = json.loads(json.dumps(controller.explain()))
    assert sum(told["reasons"].values()) == told["num_steps"] == 300
    assert told["decisions"][-1]["step"] == 299
    assert {"cost", "calibration", "drafters", "speed_up"} <= set(told)
    (row, *_) = told["calibration"]
    assert row["measured"] == 0.0 and row["claimed"] > 0.8


def test_reasons_for_no_drafts() -> None:
    quiet = Control(adaptive(cost(), "a"), [request()], {"a": bad("a", 0)})
    assert quiet.step().reason is Reason.NO_DRAFTS
    banned = Control(
        adaptive(cost(), "a"), [request(SpeculationLimits(max_nodes=0))], {"a": good("a")}
    )
    assert banned.step().reason is Reason.NOT_ALLOWED


def test_prefill_in_a_step_is_no_loss_of_speculation() -> None:
    control = Control(adaptive(cost(), "a"), [request()], {"a": good("a")})
    control.run(30)
    before = control.controller.explain()["speed_up"]
    control.num_prefill = 100
    control.run(30)
    assert control.controller.explain()["speed_up"] == before
    assert control.step().num_nodes == 8


def test_a_request_that_ended_leaves_nothing() -> None:
    controller = adaptive(cost(), "a")
    requests = [request() for _ in range(40)]
    control = Control(controller, requests, {"a": good("a")})
    control.run(3)
    for each in requests:
        controller.release(each)
    assert controller._asked == {} and controller.acceptance.own.slots == {}
