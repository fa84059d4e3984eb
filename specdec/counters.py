"""EngineCounters: what an engine's steps add up to, for whoever asks between two of them."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.metrics import SpeculationStats

if TYPE_CHECKING:  # the server reads this module too, and must not import torch
    from specdec.commit import StepOutcome, VerifiedStep
    from specdec.decision import StepTimes
    from specdec.plan import StepPlan
    from specdec.request import Request

# Upper bounds of buckets, in seconds.
STEP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
WAIT_BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """How many values lie in each bucket, and their sum; a value on a bound lies below it.

    The last count is of what lies above every bound.

    Example: after `observe(0.5)` a `Histogram((0.1, 1.0))` has the counts [0, 1, 0].
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Take in a value, as if `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def as_json(self) -> dict[str, Any]:
        """Counts and sum; the bounds are the reader's to know."""
        return {"counts": list(self.counts), "sum": self.sum}


class EngineCounters:
    """Counts over an engine's life; they only grow. `instance` tells one engine from the next.

    A prompt counts, with what of it was a prefix hit, when it has been computed. A *draft* is a
    decode step with draft nodes, a *position* a node's depth less one; what a stop or a limit cut
    counts as not accepted. Tokens per step, of the steps that drafted, are 1 + the sum over
    positions of accepted / drafts.
    """

    def __init__(self) -> None:
        self.instance = secrets.token_hex(8)
        self._num_steps = self._num_rows = self._num_prefill = 0
        self._num_prompt = self._num_prefix_hit = self._num_output = 0
        self._num_drafts = self._num_preemptions = self._num_corrupted = 0
        self._ended = SpeculationStats()  # of the requests that have
        self._drafted_at: Counter[int] = Counter()  # by depth
        self._draft_s: defaultdict[str, float] = defaultdict(float)  # by drafter
        self._forward_s = self._rest_s = 0.0
        self._step_s = Histogram(STEP_BOUNDS_S)
        self._queue_s = Histogram(WAIT_BOUNDS_S)
        self._finished: Counter[str] = Counter()
        self._queued_at: dict[str, float] = {}  # by request id, until its first step

    def observe_add(self, request: Request) -> None:
        """A request was accepted."""
        self._queued_at[request.request_id] = time.perf_counter()

    def observe_finish(self, request: Request) -> None:
        """A request ended, however it did."""
        self._queued_at.pop(request.request_id, None)
        self._finished[str(request.finish_reason)] += 1
        self._ended.add(request.stats)
        self._ended.disabled_drafters.clear()  # a list without end, which nobody asks for

    def observe_plan(self, plan: StepPlan) -> None:
        """A step begins."""
        self._num_preemptions += len(plan.preempted)
        if not self._queued_at:
            return
        now = time.perf_counter()
        begun = [chunk.request for chunk in plan.prefill_chunks]
        begun += [step.request for step in plan.decode_steps]
        for request in begun:
            queued_at = self._queued_at.pop(request.request_id, None)
            if queued_at is not None:
                self._queue_s.observe(now - queued_at)

    def observe_step(
        self, verified: Sequence[VerifiedStep], outcome: StepOutcome, times: StepTimes
    ) -> None:
        """A step was committed."""
        self._num_steps += 1
        num_prefill = outcome.plan.num_prefill
        self._num_prefill += num_prefill
        self._num_rows += num_prefill + sum(item.tree.num_nodes for item in verified)
        for item, (request, kept) in zip(verified, outcome.tokens, strict=True):
            if item.error is not None:
                self._num_corrupted += item.error_kind is None  # else the request's own fault
                continue
            self._num_output += len(kept)
            if request.stats.num_steps == 1:
                self._num_prompt += len(request.prompt_ids)
                self._num_prefix_hit += request.num_prefix_hit
            if item.tree.num_nodes > 1:
                self._num_drafts += 1
                self._drafted_at.update(item.tree.depths[1:])
        self._forward_s += times.forward_s
        self._rest_s += times.rest_s
        for drafter, seconds in times.draft_s.items():
            self._draft_s[drafter] += seconds
        self._step_s.observe(times.total_s)

    def totals(self, unfinished: Iterable[Request]) -> dict[str, Any]:
        """Everything counted, ready for JSON; lists are by position, dicts by what names them.

        What requests count themselves is taken from those that have not finished, too.
        Example: `totals["accepted_at"][0] / totals["num_drafts"]` is the share of drafts whose
        first node was accepted.
        """
        stats = SpeculationStats()
        stats.add(self._ended)
        for request in unfinished:
            stats.add(request.stats)
        return {
            "num_steps": self._num_steps,
            "num_rows": self._num_rows,
            "num_prefill": self._num_prefill,
            "num_prompt": self._num_prompt,
            "num_prefix_hit": self._num_prefix_hit,
            "num_output": self._num_output,
            "num_preemptions": self._num_preemptions,
            "num_corrupted": self._num_corrupted,
            "num_decode_steps": stats.num_steps,
            "num_drafts": self._num_drafts,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted": stats.num_accepted,
            "drafted_at": _by_position(self._drafted_at),
            "accepted_at": _reaching(stats.accepted_lengths),
            "drafted_by": dict(stats.drafted_by_source),
            "accepted_by": dict(stats.accepted_by_source),
            "forward_s": self._forward_s,
            "rest_s": self._rest_s,
            "draft_s": dict(self._draft_s),
            "step_s": self._step_s.as_json(),
            "queue_s": self._queue_s.as_json(),
            "finished": dict(self._finished),
        }


def _by_position(at_depth: Mapping[int, int]) -> list[int]:
    return [at_depth.get(depth, 0) for depth in range(1, max(at_depth, default=0) + 1)]


def _reaching(accepted_lengths: Mapping[int, int]) -> list[int]:
    """By position: how many steps accepted a node there.

    Example: `_reaching({0: 5, 2: 3})` is [3, 3].
    """
    longest = max(accepted_lengths, default=0)
    return [
        sum(count for length, count in accepted_lengths.items() if length > position)
        for position in range(longest)
    ]
