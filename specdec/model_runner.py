"""ModelRunner: packs a step's plan and trees into one batch and runs the target forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from specdec.batch_builder import BatchBuilder
from specdec.kernels import dispatch
from specdec.kernels.batch import Batch
from specdec.kernels.reference_step import ReferenceStep
from specdec.kv_cache import KVCache
from specdec.model import TargetModel
from specdec.native_cache import NativeKVCache
from specdec.native_model import NativeModel
from specdec.plan import StepPlan
from specdec.target import PagedCache, Target, TargetOutput
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
        builder = BatchBuilder(self.kv_cache.block_size)
        for chunk in plan.prefill_chunks:
            known = chunk.request.token_ids[chunk.start : chunk.end]
            builder.add(chunk.request.block_ids, known, chunk.start)
        for step, tree in zip(plan.decode_steps, trees, strict=True):
            builder.add(
                step.request.block_ids,
                tree.token_ids,
                step.request.num_tokens - 1,
                None if tree.is_chain else tree.ancestors,
                wanted=range(tree.num_nodes),
            )
        return builder.build()

    def forward(self, batch: Batch) -> TargetOutput:
        """Exactly one target forward."""
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
