"""Commit: the only place where a step changes requests and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.kv_cache import slot_at
from specdec.plan import DecodeStep, StepPlan
from specdec.request import RejectedNode, Request, TokenRecord
from specdec.scheduler import Scheduler
from specdec.target import PagedCache
from specdec.tree import DraftTree
from specdec.verification import Verdict


@dataclass(frozen=True)
class VerifiedStep:
    """A decode step with its tree and verdict; `error` is set where no token could be chosen.

    `error_kind` names a class of `specdec.errors` where the request is at fault.
    """

    step: DecodeStep
    tree: DraftTree
    verdict: Verdict
    records: tuple[TokenRecord, ...]
    error: str | None = None
    error_kind: str | None = None

    def rejected(self, num_kept: int) -> tuple[RejectedNode, ...]:
        """The draft nodes that did not become output, of which the step brought `num_kept` tokens.

        What a stop or a limit cut is among them, as in the request's counts.
        """
        tree, accepted = self.tree, set(self.verdict.path[:num_kept])
        return tuple(
            RejectedNode(
                tree.token_ids[node], tree.sources[node], tree.depths[node], self.records[0].step
            )
            for node in range(1, tree.num_nodes)
            if node not in accepted
        )


@dataclass(frozen=True)
class StepOutcome:
    """What a step committed: per request the tokens that were kept."""

    plan: StepPlan
    tokens: tuple[tuple[Request, tuple[TokenRecord, ...]], ...]


class Committer:
    """Makes accepted tokens and their keys and values permanent, and rolls the rest back."""

    def __init__(
        self, scheduler: Scheduler, kv_cache: PagedCache, eos_token_ids: Sequence[int]
    ) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._kv_cache = kv_cache
        self._eos_token_ids = tuple(eos_token_ids)

    def commit(self, plan: StepPlan, verified: Sequence[VerifiedStep]) -> StepOutcome:
        """Advance every request of the plan. A stop or a limit cuts tokens, logprobs and counts."""
        self._keep_paths(verified)
        for chunk in plan.prefill_chunks:
            chunk.request.num_computed = chunk.end
            self._publish(chunk.request)
        return StepOutcome(
            plan, tuple((item.step.request, self._commit_decode(item)) for item in verified)
        )

    def fail(self, request: Request, error: str, error_kind: str | None = None) -> None:
        """End a request whose keys and values cannot be trusted."""
        self._kv_cache.scrub(self._private_blocks(request))
        request.finish("error", error, error_kind)

    def _commit_decode(self, item: VerifiedStep) -> tuple[TokenRecord, ...]:
        request = item.step.request
        if item.error is not None:
            self.fail(request, item.error, item.error_kind)
            return ()
        kept = []
        for record in item.records:
            request.append(record, self._eos_token_ids)
            kept.append(record)
            if request.is_finished:
                break
        num_accepted = min(len(kept), item.verdict.accepted_length)
        request.stats.observe_step(
            item.tree.sources[1:],
            item.verdict.sources[:num_accepted],
            deepest=max(item.tree.depths),
        )
        request.num_computed = request.num_tokens - 1
        self._publish(request)
        if not request.is_finished:
            self._scheduler.trim(request)
        return tuple(kept)

    def _keep_paths(self, verified: Sequence[VerifiedStep]) -> None:
        """Move the accepted nodes' keys and values to the slots of their positions, all at once.

        Node i lies in the slot of position root + i; the k-th accepted node belongs to root + k.
        Nothing is done where every path lies in its place already.
        """
        size = self._pool.block_size
        src: list[int] = []
        dst: list[int] = []
        for item in verified:
            request = item.step.request
            table, root = request.block_ids, request.num_tokens - 1
            for depth, node in enumerate(item.verdict.path, start=1):
                if node != depth:
                    src.append(slot_at(table, root + node, size))
                    dst.append(slot_at(table, root + depth, size))
                    assert not self._pool.is_shared(dst[-1] // size), "a shared block is read only"
        if src:
            self._kv_cache.move(src, dst)

    def _publish(self, request: Request) -> None:
        """Offer full blocks whose tokens are all committed as prefix hits."""
        if request.is_shadow:
            return  # nobody finds its blocks, so they are the first to be used again
        num_full = request.num_computed // self._pool.block_size
        if num_full > request.num_published:
            self._pool.publish(
                request.block_ids,
                request.token_ids[: request.num_computed],
                request.cache_salt,
                request.num_published,
            )
            request.num_published = num_full

    def _private_blocks(self, request: Request) -> list[int]:
        """Withdraw what an erroneous request published and nobody shares; its writable blocks."""
        own = [b for b in request.block_ids if not self._pool.is_shared(b)]
        self._pool.forget(own)
        return own
