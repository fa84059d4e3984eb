"""Scheduler: which requests run, and what each of them computes in the next step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping

from specdec.block_pool import BlockPool
from specdec.limits import DraftLimits
from specdec.plan import DecodeStep, PrefillChunk, StepPlan
from specdec.request import Phase, Request


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


class Scheduler:
    """First come first served within a priority (lower runs first), under one token budget.

    Every running request that is past its prompt decodes in every step; prefill chunks share what
    the token budget leaves. When blocks run out the worst-ranked request is preempted: its blocks
    are released and it is computed again later. The best-ranked request can always proceed.
    """

    def __init__(
        self, pool: BlockPool, *, token_budget: int, max_running: int, max_model_len: int
    ) -> None:
        self.pool = pool
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._token_budget = token_budget
        self._max_running = max_running
        self._max_model_len = max_model_len
        self._num_arrived = 0

    @property
    def requests(self) -> list[Request]:
        """All unfinished requests, running ones first."""
        return [*self.running, *self.waiting]

    def add(self, request: Request) -> None:
        """Queue a request behind its equals."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        insort(self.waiting, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Forget a finished or aborted request and release its blocks."""
        (self.running if request in self.running else self.waiting).remove(request)
        self.pool.release(request.block_ids)
        request.block_ids = []

    def plan(self, limits: Mapping[str, DraftLimits]) -> StepPlan:
        """State the next step's work, reserving the blocks it needs.

        limits: what may be drafted, by request id.
        """
        step = _StepDraft(self._token_budget)
        decoding = [r for r in self.running if r.num_computed == r.num_tokens - 1]
        prefilling = [r for r in self.running if r.num_computed < r.num_tokens - 1]
        is_prefill_due = bool(prefilling or self.waiting)
        # Draft nodes of all requests together; prompts keep half of the token budget.
        node_room = self._token_budget // 2 if is_prefill_due else self._token_budget
        node_room = max(0, node_room - len(decoding))
        for request in decoding:
            if request in self.running:  # may have been preempted for a better one
                self._plan_decode(step, request, limits[request.request_id], node_room)
        step.share_nodes(node_room)
        for request in prefilling:
            if request in self.running:
                self._plan_prefill(step, request, limits[request.request_id])
        while self.waiting and len(self.running) < self._max_running and step.room > 0:
            if step.preempted or not self._admit(step, self.waiting[0], limits):
                break
        return step.plan()

    def _plan_decode(
        self, step: _StepDraft, request: Request, limits: DraftLimits, node_room: int
    ) -> None:
        nodes = min(node_room, self._fitting_nodes(request, limits.node_budget))
        root_end = request.num_tokens
        if self._reserve(request, root_end + nodes):
            step.decode(request, nodes, limits)
        elif self._reserve_by_preemption(step, request, root_end):
            step.decode(request, 0, limits)

    def _fitting_nodes(self, request: Request, node_budget: int) -> int:
        """No nodes past the last position, and none for the last token."""
        if request.max_output - len(request.output) <= 1:
            return 0
        return max(0, min(node_budget, self._max_model_len - request.num_tokens))

    def _plan_prefill(self, step: _StepDraft, request: Request, limits: DraftLimits) -> bool:
        """Compute known tokens as far as room goes; past the last of them, decode at once."""
        start, before_root = request.num_computed, request.num_tokens - 1
        end = min(before_root, start + max(0, step.room))
        is_complete = end == before_root and step.room > end - start
        if end == start and not is_complete:
            return False
        if not self._reserve_by_preemption(step, request, end + is_complete):
            return False
        step.prefill(request, start, end)
        if is_complete:
            nodes = self._fitting_nodes(request, min(limits.node_budget, max(0, step.room - 1)))
            if not self._reserve(request, request.num_tokens + nodes):
                nodes = 0
            step.decode(request, nodes, limits)
            step.share_nodes(nodes)
        return True

    def _admit(self, step: _StepDraft, request: Request, limits: Mapping[str, DraftLimits]) -> bool:
        request.block_ids = self.pool.share_prefix(request.token_ids, request.cache_salt)
        num_hit = len(request.block_ids) * self.pool.block_size
        request.num_computed = num_hit
        request.num_published = len(request.block_ids)
        if not request.output:
            request.num_prefix_hit = num_hit
        self.waiting.pop(0)
        insort(self.running, request, key=_rank)
        request.phase = Phase.RUNNING
        if self._plan_prefill(step, request, limits[request.request_id]):
            return True
        self._preempt(request)
        return False

    def _reserve(self, request: Request, num_slots: int) -> bool:
        """Grow the request's block table to hold `num_slots` slots, if there are blocks."""
        missing = -(-num_slots // self.pool.block_size) - len(request.block_ids)
        if missing <= 0:
            return True
        last = request.block_ids[-1] if request.block_ids else None
        blocks = self.pool.reserve(missing, after=last)
        if blocks is None:
            return False
        request.block_ids.extend(blocks)
        return True

    def _reserve_by_preemption(self, step: _StepDraft, request: Request, num_slots: int) -> bool:
        """Reserve, preempting worse-ranked requests that have no part in this step yet."""
        while not self._reserve(request, num_slots):
            victim = self.running[-1]
            if victim is request or step.has(victim):
                return False  # wait: a better-ranked request takes these blocks when it needs them
            self._preempt(victim)
            step.preempted.append(victim)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed = 0
        request.num_published = 0
        request.phase = Phase.WAITING
        insort(self.waiting, request, key=_rank)

    def trim(self, request: Request) -> None:
        """Roll back: release blocks beyond the next root's, which held rejected nodes."""
        keep = -(-request.num_tokens // self.pool.block_size)
        self.pool.release(request.block_ids[keep:])
        del request.block_ids[keep:]


class _StepDraft:
    """A plan in the making."""

    def __init__(self, room: int) -> None:
        self.room = room  # query tokens left
        self.chunks: list[PrefillChunk] = []
        self.decodes: list[DecodeStep] = []
        self.preempted: list[Request] = []
        self._node_room = 0  # draft nodes that may be verified
        self._num_unshared = 0  # draft nodes of decodes since room was last given to nodes
        self._ids: set[str] = set()

    def has(self, request: Request) -> bool:
        return request.request_id in self._ids

    def prefill(self, request: Request, start: int, end: int) -> None:
        self._ids.add(request.request_id)
        if end > start:
            self.chunks.append(PrefillChunk(request, start, end))
            self.room -= end - start

    def decode(self, request: Request, node_budget: int, limits: DraftLimits) -> None:
        self._ids.add(request.request_id)
        self.decodes.append(DecodeStep(request, node_budget, limits.max_depth, limits.levels))
        self.room -= 1
        self._num_unshared += node_budget

    def share_nodes(self, most: int) -> None:
        """Give at most so much room to the draft nodes of the decodes since the last time."""
        nodes = min(most, self._num_unshared)
        self._num_unshared = 0
        self._node_room += nodes
        self.room -= nodes

    def plan(self) -> StepPlan:
        return StepPlan(
            tuple(self.chunks), tuple(self.decodes), tuple(self.preempted), self._node_room
        )
