"""ModelRunner: packs a step's plan and trees into one batch and runs the target forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from specdec.kernels import dispatch
from specdec.kernels.batch import Batch
from specdec.kernels.reference_step import ReferenceStep
from specdec.kernels.segment import Segment
from specdec.kv_cache import KVCache, slot_at
from specdec.model import TargetModel
from specdec.native_cache import NativeKVCache
from specdec.native_model import NativeModel
from specdec.plan import StepPlan
from specdec.request import Request
from specdec.target import PagedCache, Target
from specdec.tree import DraftTree

if TYPE_CHECKING:
    from specdec.device_forward import DeviceForward


class ModelRunner:
    """Owns the target model and its KV cache."""

    def __init__(self, model: Target, kv_cache: PagedCache) -> None:
        self.model = model
        self.kv_cache = kv_cache

    def pack(self, plan: StepPlan, trees: Sequence[DraftTree]) -> Batch:
        """Prefill chunks and draft trees as one ragged batch."""
        rows = _Rows(self.kv_cache.block_size)
        for chunk in plan.prefill_chunks:
            rows.add_chunk(chunk.request, chunk.start, chunk.end)
        first_logit = [0]
        logit_rows: list[int] = []
        for step, tree in zip(plan.decode_steps, trees, strict=True):
            first = rows.add_tree(step.request, tree)
            logit_rows.extend(range(first, first + tree.num_nodes))
            first_logit.append(len(logit_rows))
        return Batch(
            token_ids=tuple(rows.token_ids),
            positions=tuple(rows.positions),
            slots=tuple(rows.slots),
            segments=tuple(rows.segments),
            logit_rows=tuple(logit_rows),
            first_logit=tuple(first_logit),
        )

    def forward(self, batch: Batch) -> Tensor:
        """Exactly one target forward: logits [num_logits, vocab], valid until the next one."""
        model, kv_cache = self.model, self.kv_cache
        if isinstance(model, NativeModel):
            assert isinstance(kv_cache, NativeKVCache)
            return model.forward(batch, kv_cache)
        if dispatch.uses_triton(kv_cache.device):
            return self._on_device(batch)
        assert isinstance(model, TargetModel) and isinstance(kv_cache, KVCache)
        ops = ReferenceStep(
            batch,
            model.heads,
            model.cos,
            model.sin,
            block_size=kv_cache.block_size,
            num_padding=model.padding(batch.num_rows),
        )
        return model.forward(ops, kv_cache)

    def warm_up(self, node_budget: int, token_budget: int) -> None:
        """Let a GPU compile and record its steps before the first request; a CPU needs none."""
        if self.kv_cache.device.type == "cuda":
            self._on_device.warm_up(node_budget, token_budget)

    @cached_property
    def _on_device(self) -> DeviceForward:
        from specdec.device_forward import DeviceForward  # imports triton

        assert isinstance(self.model, TargetModel) and isinstance(self.kv_cache, KVCache)
        return DeviceForward(self.model, self.kv_cache)


@dataclass
class _Rows:
    """Rows of a batch in the making."""

    block_size: int
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def add_chunk(self, request: Request, start: int, end: int) -> None:
        """Known tokens [start, end)."""
        self._add(request, request.token_ids[start:end], start)

    def add_tree(self, request: Request, tree: DraftTree) -> int:
        """Root and draft nodes; node i goes to the slot of position root + i. First row's index."""
        first, root = len(self.token_ids), request.num_tokens - 1
        self._add(request, tree.token_ids, root, None if tree.is_chain else tree.ancestors)
        return first

    def _add(
        self,
        request: Request,
        token_ids: Sequence[int],
        root: int,
        ancestors: tuple[int, ...] | None = None,
    ) -> None:
        table, count = request.block_ids, len(token_ids)
        segment = Segment(len(self.token_ids), count, root, tuple(table), ancestors)
        self.segments.append(segment)
        self.token_ids.extend(token_ids)
        self.positions.extend(segment.positions)
        self.slots.extend(slot_at(table, p, self.block_size) for p in range(root, root + count))
