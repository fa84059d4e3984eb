"""Scheduler: fairness to running streams, priorities, preemption and progress."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.block_pool import BlockPool
from specdec.controller import FixedBudget
from specdec.limits import SpeculationLimits
from specdec.params import SamplingParams
from specdec.plan import StepPlan
from specdec.request import Phase, Request, TokenRecord
from specdec.scheduler import Scheduler

SIZE = 4


class Loop:
    """The engine's loop around a scheduler, without a model: every draft is rejected."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        token_budget: int = 16,
        max_running: int = 8,
        max_model_len: int = 200,
        node_budget: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.scheduler = Scheduler(
            self.pool,
            token_budget=token_budget,
            max_running=max_running,
            max_model_len=max_model_len,
        )
        self.controller = FixedBudget(node_budget)
        self.token_budget = token_budget

    def add(self, name: str, length: int, output: int = 5, priority: int = 0) -> Request:
        # Prompts of one length are equal, so they can be prefix hits.
        prompt = tuple((length * 31 + i) % 1000 for i in range(length))
        request = Request(name, prompt, SamplingParams(max_tokens=output), priority=priority)
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.controller.limits(self.scheduler.requests))
        self.check(plan)
        for chunk in plan.prefill_chunks:
            chunk.request.num_computed = chunk.end
            self.publish(chunk.request)
        for decode in plan.decode_steps:
            request = decode.request
            request.append(TokenRecord(0, ("target",), 1, 0), ())
            request.num_computed = request.num_tokens - 1
            self.publish(request)
            if request.is_finished:
                self.scheduler.remove(request)
            else:
                self.scheduler.trim(request)
        self.pool.check([r.block_ids for r in self.scheduler.requests])
        return plan

    def publish(self, request: Request) -> None:
        full = request.num_computed // SIZE
        tokens = request.token_ids[: request.num_computed]
        self.pool.publish(request.block_ids, tokens, request.cache_salt, request.num_published)
        request.num_published = max(full, request.num_published)

    def check(self, plan: StepPlan) -> None:
        """What must hold for every plan."""
        running = self.scheduler.running
        decodes = [d.request for d in plan.decode_steps]
        chunks = [c.request for c in plan.prefill_chunks]
        for group in (decodes, chunks):
            assert len({r.request_id for r in group}) == len(group)
            assert all(any(r is other for other in running) for r in group)
        chunk_tokens = sum(c.end - c.start for c in plan.prefill_chunks)
        num_streams = len(plan.decode_steps)
        assert plan.node_room is not None
        assert 0 <= plan.node_room <= sum(d.node_budget for d in plan.decode_steps)
        num_tokens = chunk_tokens + num_streams + plan.node_room
        assert num_tokens <= max(self.token_budget, num_streams)
        for chunk in plan.prefill_chunks:
            assert chunk.request.num_computed == chunk.start < chunk.end
            assert len(chunk.request.block_ids) * SIZE >= chunk.end
        for decode in plan.decode_steps:
            need = decode.request.num_tokens + decode.node_budget
            assert len(decode.request.block_ids) * SIZE >= need
        assert all(r.phase is Phase.WAITING and not r.block_ids for r in plan.preempted)
        for queue in (self.scheduler.running, self.scheduler.waiting):
            ranks = [(r.priority, r.arrival) for r in queue]
            assert ranks == sorted(ranks)

    def run(self) -> list[StepPlan]:
        plans = []
        while self.scheduler.requests:
            plans.append(self.step())
            assert not plans[-1].is_empty and len(plans) < 3000, "no progress"
        return plans


def names(requests: Sequence[Request]) -> list[str]:
    return [r.request_id for r in requests]


def decoding(plan: StepPlan) -> list[str]:
    return [d.request.request_id for d in plan.decode_steps]


@pytest.mark.parametrize("node_budget", [0, 3, 100])
def test_a_long_prompt_never_stalls_running_streams(node_budget: int) -> None:
    loop = Loop(node_budget=node_budget, token_budget=16)
    for name in ("a", "b"):
        loop.add(name, 3, output=60)
    loop.step()
    loop.step()
    long = loop.add("long", 150)
    sizes = []
    while long.num_computed < 149:
        plan = loop.step()
        assert {"a", "b"} <= set(decoding(plan))
        (chunk,) = plan.prefill_chunks
        sizes.append(chunk.end - chunk.start)
    # Drafts of the running streams leave at least half of the budget to the prompt.
    assert max(sizes) <= 14 and min(sizes[:-1]) >= 8
    assert sum(sizes) == 149


def test_the_last_chunk_decodes_at_once() -> None:
    loop = Loop(token_budget=16)
    request = loop.add("a", 20)
    plan = loop.step()
    assert [(c.start, c.end) for c in plan.prefill_chunks] == [(0, 16)]
    assert not plan.decode_steps
    plan = loop.step()
    assert [(c.start, c.end) for c in plan.prefill_chunks] == [(16, 19)]
    assert decoding(plan) == ["a"] and len(request.output) == 1


def test_node_room_is_shared() -> None:
    """Each may draft as much as all may have verified: the controller chooses among them."""
    loop = Loop(token_budget=32, node_budget=100)
    for name in "abcd":
        loop.add(name, 2, output=50)
    while len(loop.scheduler.running) < 4 or loop.scheduler.waiting:
        loop.step()
    plan = loop.step()
    assert [d.node_budget for d in plan.decode_steps] == [28] * 4
    assert plan.node_room == 28  # 32 - 4 roots
    loop.add("long", 100)
    plan = loop.step()
    assert [d.node_budget for d in plan.decode_steps] == [12] * 4
    assert plan.node_room == 12  # a prompt is due: 16 - 4
    assert plan.num_prefill == 16


def test_node_room_is_what_the_requests_may_draft() -> None:
    loop = Loop(token_budget=64, node_budget=3)
    loop.add("a", 2, output=50)
    loop.add("b", 2, output=50)
    loop.step()
    assert loop.step().node_room == 6


def test_a_request_may_ask_for_fewer_nodes() -> None:
    loop = Loop(token_budget=64, node_budget=8)
    greedy, modest = loop.add("greedy", 2, 20), loop.add("modest", 2, 20)
    modest.speculation = SpeculationLimits(max_nodes=2)
    greedy.speculation = SpeculationLimits(max_nodes=99)
    loop.step()
    assert [d.node_budget for d in loop.step().decode_steps] == [8, 2]


def test_no_nodes_for_the_last_token_or_past_the_context() -> None:
    loop = Loop(node_budget=8, max_model_len=12)
    loop.add("a", 6, output=4)
    got = [d.node_budget for _ in range(4) for d in loop.step().decode_steps]
    assert got == [6, 5, 4, 0]


def test_first_come_first_served_within_a_priority() -> None:
    loop = Loop(max_running=1)
    for name, priority in [("a", 1), ("b", 1), ("c", 0), ("d", 1), ("e", 0)]:
        loop.add(name, 3, output=2, priority=priority)
    order: list[str] = []
    for plan in loop.run():
        order += [n for n in decoding(plan) if n not in order]
    assert order == ["c", "e", "a", "b", "d"]


def test_max_running() -> None:
    loop = Loop(max_running=2, token_budget=100)
    for name in "abcde":
        loop.add(name, 3)
    most = max(len(plan.decode_steps) for plan in loop.run())
    assert most == 2


def test_the_worst_ranked_request_is_preempted_and_finishes_later() -> None:
    loop = Loop(num_blocks=6, token_budget=32, max_model_len=24)
    good, bad = loop.add("good", 8, output=14), loop.add("bad", 7, output=14, priority=5)
    plans = loop.run()
    preempted = [name for plan in plans for name in names(plan.preempted)]
    assert preempted and set(preempted) == {"bad"}
    assert len(good.output) == len(bad.output) == 14
    # From its first step on the better one was never without a step.
    steps = [index for index, plan in enumerate(plans) if "good" in decoding(plan)]
    assert steps == list(range(steps[0], steps[0] + 14))


def test_drafts_are_dropped_where_their_blocks_would_cost_a_preemption() -> None:
    loop = Loop(num_blocks=4, token_budget=64, node_budget=8, max_model_len=16)
    loop.add("a", 7, output=2).speculation = SpeculationLimits(max_nodes=0)
    loop.add("b", 6, output=2)
    plan = loop.step()
    assert decoding(plan) == ["a", "b"] and not plan.preempted
    assert [decode.node_budget for decode in plan.decode_steps] == [0, 0]


def test_a_preempted_request_finds_its_own_prefix_again() -> None:
    loop = Loop(num_blocks=8, token_budget=32, max_model_len=32)
    loop.add("good", 8, output=20)
    bad = loop.add("bad", 7, output=20)
    while bad.phase is not Phase.WAITING or not bad.output:
        loop.step()
    assert bad.num_computed == 0 and bad.block_ids == []
    loop.run()
    assert len(bad.output) == 20


def test_prefix_hits_are_counted_and_not_computed_again() -> None:
    loop = Loop(token_budget=64)
    loop.add("a", 18, output=1)
    loop.run()
    again, other = loop.add("b", 18, output=1), loop.add("c", 17, output=1)
    plan = loop.step()
    assert again.num_prefix_hit == 16 and other.num_prefix_hit == 0
    assert [(c.start, c.end) for c in plan.prefill_chunks] == [(16, 17), (0, 16)]


def test_trim_keeps_the_next_roots_block() -> None:
    loop = Loop(token_budget=64, node_budget=20)
    request = loop.add("a", 4, output=30)
    loop.step()
    assert len(request.block_ids) == 2  # five tokens; the rejected nodes' blocks went back
    assert loop.pool.num_free == 98


@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 2), st.integers(0, 9)),
        min_size=1,
        max_size=8,
    ),
    num_blocks=st.integers(8, 14),  # 8 hold the longest request alone
    token_budget=st.integers(2, 20),
    max_running=st.integers(1, 8),
    node_budget=st.integers(0, 9),
)
@settings(max_examples=150, deadline=None)
def test_everyone_finishes_even_in_a_tiny_pool(
    jobs: list[tuple[int, int, int, int]],
    num_blocks: int,
    token_budget: int,
    max_running: int,
    node_budget: int,
) -> None:
    loop = Loop(
        num_blocks=num_blocks,
        token_budget=token_budget,
        max_running=max_running,
        max_model_len=32,
        node_budget=node_budget,
    )
    requests: list[Request] = []
    step = 0
    while len(requests) < len(jobs) or loop.scheduler.requests:
        for index, (length, output, priority, start) in enumerate(jobs):
            if start == step:
                requests.append(loop.add(f"r{index}", length, output, priority))
        if loop.scheduler.requests:
            assert not loop.step().is_empty
        step += 1
        assert step < 1000, "no progress"
    assert all(len(r.output) == r.max_output for r in requests)
    assert loop.pool.num_free == num_blocks
