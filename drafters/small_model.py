"""SmallModelDrafter: a small model guesses ahead of the target (Leviathan et al. 2022), as a tree.

Its KV cache is its own and needs no copy of the engine's bookkeeping: what the target commits it
computes itself when it is next asked, in the same forward that reads the new root, and what was
rejected is overwritten. So roll-backs cost nothing, and preemption and prefix hits of the target
are not its business; it has prefix hits of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec import checkpoints
from specdec.batch_builder import BatchBuilder
from specdec.block_pool import BlockPool
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.growth import Growth
from specdec.drafters.pretrained.lookup import pretrained
from specdec.drafters.ranking import Guess, rank
from specdec.drafting import DraftContext, Drafter
from specdec.model_runner import ModelRunner
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree

MAX_DEPTH = 8
MAX_WIDTH = 8  # nodes of a level that get children
NUM_CHILDREN = 8  # of each
LEAST_WORTH = 0.1  # of a node that gets children: a forward for less gains less than it costs
CHUNK = 256  # known tokens per forward when it catches up


@dataclass
class _Follower:
    """How far the draft model has followed one request."""

    request: Request
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens of the request whose keys and values are valid
    num_published: int = 0


class SmallModelDrafter(Drafter):
    """Drafts trees with any checkpoint that the engine can load and that has the target's tokens.

    One forward per level for all requests, best nodes first; a sampled request's guesses are ranked
    with its own noise (ranking.py).

    Example: `--drafter small-model=FOLDER`.
    """

    name = "small-model"
    is_sequential = True

    def __init__(self, draft: DraftModel, *, num_blocks: int, block_size: int) -> None:
        kv_cache = draft.model.make_kv_cache("auto", num_blocks=num_blocks, block_size=block_size)
        self.pool = BlockPool(num_blocks, block_size)
        cache_bytes = num_blocks * draft.model.kv_bytes_per_block("auto", block_size)
        self.num_bytes = draft.model.weight_bytes + cache_bytes
        self._runner = ModelRunner(draft.model, kv_cache)
        self._vocabulary = draft.vocabulary
        self._max_position = draft.max_position
        self._vocab_size = draft.model.config.vocab_size
        self._followers: dict[str, _Follower] = {}  # least recently used first

    @classmethod
    def load(cls, context: DraftContext) -> SmallModelDrafter:
        """The checkpoint that was named, or the one that comes with the target.

        Its cache has as many blocks as the target's has beside it, which for a small model takes
        little.
        """
        target, config = context.target, context.config
        folder = (
            pretrained(target, cls.name)
            if context.checkpoint is None
            else checkpoints.resolve(context.checkpoint)
        )
        draft = DraftModel.load(folder, target, config)
        per_block = target.model.kv_bytes_per_block(config.kv, config.block_size)
        per_block += draft.model.kv_bytes_per_block("auto", config.block_size)
        return cls(
            draft,
            num_blocks=config.kv_memory_mib * 2**20 // per_block,
            block_size=config.block_size,
        )

    def admit(self, request: Request) -> None:
        """Find what of its prompt is computed already."""
        follower = _Follower(request)
        follower.block_ids = self.pool.share_prefix(request.token_ids, request.cache_salt)
        follower.num_published = len(follower.block_ids)
        follower.num_computed = follower.num_published * self.pool.block_size
        self._followers[request.request_id] = follower

    @torch.inference_mode()
    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """Catch up with what was committed, then grow all trees level by level."""
        busy = {step.request.request_id for step in steps}
        growing: list[tuple[_Follower, Growth]] = []
        trees: dict[int, Growth] = {}
        for index, step in enumerate(steps):
            follower = self._followers[step.request.request_id]
            if step.node_budget > 0 and self._reserve(follower, step.node_budget, busy):
                trees[index] = Growth(step.root, step.node_budget, step.max_depth)
                growing.append((follower, trees[index]))
        if growing:
            self._grow(growing)
        return [
            trees[index].tree(self.name) if index in trees else DraftTree.root_only(step.root)
            for index, step in enumerate(steps)
        ]

    def release(self, request: Request) -> None:
        """Let go of the request's blocks."""
        follower = self._followers.pop(request.request_id, None)
        if follower is not None:
            self.pool.release(follower.block_ids)

    def _reserve(self, follower: _Follower, node_budget: int, busy: set[str]) -> bool:
        """Blocks for all known tokens and the nodes; idle requests give theirs up for it."""
        num_slots = follower.request.num_tokens + node_budget
        if num_slots > self._max_position:
            return False
        missing = -(-num_slots // self.pool.block_size) - len(follower.block_ids)
        if missing > 0:
            for other in list(self._followers.values()):
                if self.pool.num_free >= missing:
                    break
                if other.request.request_id not in busy:
                    self._abandon(other)
            last = follower.block_ids[-1] if follower.block_ids else None
            blocks = self.pool.reserve(missing, after=last)
            if blocks is None:
                return False
            follower.block_ids += blocks
        name = follower.request.request_id
        self._followers[name] = self._followers.pop(name)
        return True

    def _abandon(self, follower: _Follower) -> None:
        self.pool.release(follower.block_ids)
        follower.block_ids = []
        follower.num_computed = follower.num_published = 0

    def _grow(self, growing: Sequence[tuple[_Follower, Growth]]) -> None:
        logits = self._catch_up([follower for follower, _ in growing])
        level = [(follower, growth, growth.frontier(1)) for follower, growth in growing]
        for depth in range(1, MAX_DEPTH + 1):
            guesses = [
                Guess(follower.request, follower.request.num_tokens - 1 + depth)
                for follower, _, nodes in level
                for _ in nodes
            ]
            ranked = iter(
                rank(logits, guesses, NUM_CHILDREN, self._vocabulary, uses_noise=self.uses_noise)
            )
            for _, growth, nodes in level:
                for node in nodes:
                    found = next(ranked)
                    growth.extend(node, found.token_ids, found.scores)
            if depth == MAX_DEPTH:
                break
            level = [
                (follower, growth, nodes)
                for follower, growth, _ in level
                if (nodes := growth.frontier(MAX_WIDTH, LEAST_WORTH))
            ]
            if not level:
                break
            logits = self._forward_trees(level)

    def _catch_up(self, followers: Sequence[_Follower]) -> Tensor:
        """Compute what is committed, the root included; logits of the roots [num_requests, ...]."""
        for follower in followers:
            while follower.request.num_tokens - follower.num_computed > CHUNK:
                self._compute([follower], CHUNK, is_wanted=False)
        return self._compute(followers, CHUNK, is_wanted=True)

    def _compute(self, followers: Sequence[_Follower], most: int, *, is_wanted: bool) -> Tensor:
        builder = BatchBuilder(self.pool.block_size)
        for follower in followers:
            known = follower.request.token_ids
            first = min(follower.num_computed, len(known) - 1)  # asked twice, the root once more
            # Row invariance is not needed here: a guess may round as it likes.
            rows = self._read(known[first : first + most])
            wanted = [len(rows) - 1] if is_wanted else None
            builder.add(follower.block_ids, rows, first, wanted=wanted)
        logits = self._runner.forward(builder.build()).logits
        for follower in followers:
            follower.num_computed = min(follower.num_computed + most, follower.request.num_tokens)
            self._publish(follower)
        return logits[:, : len(self._vocabulary)]

    def _read(self, token_ids: Sequence[int]) -> list[int]:
        """The target may have tokens that the draft model has no row for: padding, as a rule."""
        return [token_id if token_id < self._vocab_size else 0 for token_id in token_ids]

    def _publish(self, follower: _Follower) -> None:
        num_full = follower.num_computed // self.pool.block_size
        if num_full > follower.num_published:
            request = follower.request
            self.pool.publish(
                follower.block_ids,
                request.token_ids[: follower.num_computed],
                request.cache_salt,
                follower.num_published,
            )
            follower.num_published = num_full

    def _forward_trees(self, level: Sequence[tuple[_Follower, Growth, list[int]]]) -> Tensor:
        """Logits of the level's nodes. Their ancestors are computed again: rows are cheaper than a
        second kind of attention."""
        builder = BatchBuilder(self.pool.block_size)
        for follower, growth, nodes in level:
            rows, ancestors = growth.with_ancestors(nodes)
            builder.add(
                follower.block_ids,
                self._read([growth.token_ids[node] for node in rows]),
                follower.request.num_tokens - 1,
                ancestors,
                wanted=[rows.index(node) for node in nodes],
            )
        return self._runner.forward(builder.build()).logits[:, : len(self._vocabulary)]
