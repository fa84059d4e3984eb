"""ModelRunner: packs a step's plan and trees into one batch and runs the target forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.batch import Batch
from specdec.kernels.attention_group import ROW_TILE, AttentionGroup
from specdec.kv_cache import KVCache, slot_at
from specdec.model import TargetModel
from specdec.plan import StepPlan
from specdec.request import Request
from specdec.row_invariance import padding
from specdec.tree import DraftTree


class ModelRunner:
    """Owns the target model and its KV cache."""

    def __init__(self, model: TargetModel, kv_cache: KVCache) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._windows = sorted(set(model.config.windows), key=lambda w: w or 0)

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
        rows.pad(padding(len(rows.token_ids), self.model.min_rows))
        return Batch(
            token_ids=torch.tensor(rows.token_ids),
            positions=torch.tensor(rows.positions),
            slots=torch.tensor(rows.slots),
            groups={w: tuple(s.group(w) for s in rows.spans) for w in self._windows},
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
            first_logit=tuple(first_logit),
        )

    def forward(self, batch: Batch) -> Tensor:
        """Exactly one target forward: logits [num_logits, vocab]."""
        return self.model.forward(batch, self.kv_cache)


@dataclass(frozen=True)
class _Span:
    """At most ROW_TILE neighbouring rows of one request, their keys' places and their reach."""

    start: int
    positions: Tensor  # int64 [num_rows]
    table: list[int]
    block_size: int
    tree: DraftTree | None = None  # set for the rows of a branching tree
    first_node: int = 0
    root_position: int = 0

    def group(self, window: int | None) -> AttentionGroup:
        """What these rows see, as tiles and a bias."""
        end = self.start + len(self.positions)
        size = self.block_size
        last = int(self.positions.max())
        num_tiles = last // size + 1
        num_shared = num_tiles if self.tree is None else self.root_position // size
        first_own = int(self.positions.min()) if self.tree is None else self.root_position
        first_masked = 0 if window is not None else first_own // size
        lanes = torch.arange(first_masked * size, num_tiles * size)
        reach = self.positions[:, None]
        is_visible = lanes <= reach  # [num_rows, lanes]
        if window is not None:
            is_visible &= lanes > reach - window
        bias = torch.zeros(is_visible.shape).masked_fill_(~is_visible, float("-inf"))
        bias = bias.view(len(reach), -1, size).transpose(0, 1).unsqueeze(1)
        return AttentionGroup(
            self.start,
            end,
            _run_or_index(self.table[:num_shared]),
            num_shared,
            bias.contiguous(),
            None if self.tree is None else self._tail_slots(num_shared * size, num_tiles * size),
        )

    def _tail_slots(self, first: int, last: int) -> Tensor:
        """Slots by position [first, last) for each row: committed ones, then its ancestors."""
        assert self.tree is not None
        root = self.root_position
        committed = [slot_at(self.table, p, self.block_size) for p in range(first, root)]
        lanes = []
        for node in range(self.first_node, self.first_node + len(self.positions)):
            own = [slot_at(self.table, root + n, self.block_size) for n in self.tree.path(node)]
            row = committed + own
            lanes.append(row + [row[-1]] * (last - first - len(row)))  # masked lanes: any slot
        return torch.tensor(lanes)


@dataclass
class _Rows:
    """Rows of a batch in the making."""

    block_size: int
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    spans: list[_Span] = field(default_factory=list)

    def add_chunk(self, request: Request, start: int, end: int) -> None:
        """Known tokens [start, end)."""
        positions = list(range(start, end))
        self._add(request, request.token_ids[start:end], positions, positions)

    def add_tree(self, request: Request, tree: DraftTree) -> int:
        """Root and draft nodes; node i goes to the slot of position root + i. First row's index."""
        first, root = len(self.token_ids), request.num_tokens - 1
        positions = [root + depth for depth in tree.depths]
        places = [root + node for node in range(tree.num_nodes)]
        self._add(request, tree.token_ids, positions, places, None if tree.is_chain else tree)
        return first

    def _add(
        self,
        request: Request,
        token_ids: Sequence[int],
        positions: list[int],
        places: list[int],
        tree: DraftTree | None = None,
    ) -> None:
        first = len(self.token_ids)
        table = request.block_ids
        self.token_ids.extend(token_ids)
        self.positions.extend(positions)
        self.slots.extend(slot_at(table, place, self.block_size) for place in places)
        for offset in range(0, len(positions), ROW_TILE):
            self.spans.append(
                _Span(
                    start=first + offset,
                    positions=torch.tensor(positions[offset : offset + ROW_TILE]),
                    table=table,
                    block_size=self.block_size,
                    tree=tree,
                    first_node=offset,
                    root_position=positions[0],
                )
            )

    def pad(self, num_rows: int) -> None:
        """Add rows that belong to no group and have no slot."""
        self.token_ids.extend([0] * num_rows)
        self.positions.extend([0] * num_rows)


def _run_or_index(blocks: list[int]) -> slice | Tensor:
    """Neighbouring blocks as a slice, which reads the cache in place; others as an index."""
    if not blocks or blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        start = blocks[0] if blocks else 0
        return slice(start, start + len(blocks))
    return torch.tensor(blocks)
