"""Kernel cases of tree attention: trees over scattered blocks, NaN wherever no row may read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from specdec.evals.kernel.case import Call, Dims, Expected, Place, Prepared, Results
from specdec.kernels import reference
from specdec.kernels.attention_group import attention_groups
from specdec.kernels.attention_tiles import Processors, make_tiles, tile_shape
from specdec.kernels.segment import Segment, ancestor_masks

MAX_ATTENTION_SETS = 128
REACH = 8  # a parent stands at most this far before its child
_E4M3_NAN = 0x7F


def random_parents(num_nodes: int, seed: int) -> tuple[int, ...]:
    """A tree's parents, the root's -1; parents come before children."""
    rng = random.Random(seed)
    return (-1, *(rng.randrange(max(0, node - REACH), node) for node in range(1, num_nodes)))


@dataclass(frozen=True)
class TreeAttention:
    """`batch` requests of `context` committed positions, each with another tree of `nodes`."""

    context: int
    nodes: int
    batch: int
    dims: Dims
    dtype: torch.dtype
    is_deterministic: bool = False
    is_e4m3: bool = False

    @property
    def op(self) -> str:
        kind = "deterministic" if self.is_deterministic else "fast"
        return f"tree_attention {kind}{' fp8' if self.is_e4m3 else ''}"

    @property
    def label(self) -> str:
        return f"context {self.context}, {self.nodes} nodes, batch {self.batch}"

    @property
    def num_bytes(self) -> int:
        """A request's keys and values once, however many nodes read them; q and out per row."""
        dims = self.dims
        per_key = 2 * dims.num_kv_heads * dims.head_dim * (1 if self.is_e4m3 else self._itemsize)
        per_row = 2 * dims.num_heads * dims.head_dim * self._itemsize
        return self.batch * ((self.context + self.nodes) * per_key + self.nodes * per_row)

    @property
    def num_flops(self) -> int:
        """Two products per visible pair of row and key: the context, and a node's ancestors."""
        num_own = sum(mask.bit_count() for masks in self.masks for mask in masks)
        num_pairs = self.batch * self.nodes * self.context + num_own
        return 4 * num_pairs * self.dims.num_heads * self.dims.head_dim

    @property
    def _itemsize(self) -> int:
        return self.dtype.itemsize

    @cached_property
    def masks(self) -> tuple[tuple[int, ...], ...]:
        """Ancestor masks per request."""
        return tuple(ancestor_masks(random_parents(self.nodes, seed)) for seed in range(self.batch))

    def prepare(self, place: Place) -> Prepared:
        dims, num_rows = self.dims, self.batch * self.nodes
        num_sets = place.num_sets(self.num_bytes, MAX_ATTENTION_SETS)
        width = -(-(self.context + self.nodes) // dims.block_size)
        num_used = num_sets * self.batch * width
        order = torch.randperm(num_used + 2).tolist()  # two blocks of nobody
        tables = [order[first : first + width] for first in range(0, num_used, width)]
        sets = [self._segments(tables[i * self.batch :]) for i in range(num_sets)]
        q = place.randn(num_sets, num_rows, dims.num_heads, dims.head_dim, dtype=self.dtype)
        k_cache, v_cache = self._caches(place, order[num_used:], tables)
        return Prepared(
            [
                self._call(place, q[i], k_cache, v_cache, segments)
                for i, segments in enumerate(sets)
            ],
            lambda: self._expect(q[0], k_cache, v_cache, sets[0]),
        )

    def _segments(self, tables: Sequence[list[int]]) -> tuple[Segment, ...]:
        return tuple(
            Segment(
                index * self.nodes,
                self.nodes,
                self.context,
                tables[index],
                self.masks[index] if self.nodes > 1 else None,
            )
            for index in range(self.batch)
        )

    def _caches(
        self, place: Place, unused: list[int], tables: Sequence[list[int]]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values; NaN in blocks of nobody and behind the last node of each request.

        Not for the reference: masked lanes of its blocks must hold numbers.
        """
        dims = self.dims
        num_blocks = len(tables) * len(tables[0]) + len(unused)
        caches = place.randn(
            2, num_blocks, dims.num_kv_heads, dims.block_size, dims.head_dim, dtype=self.dtype
        )
        num_in_last = (self.context + self.nodes - 1) % dims.block_size + 1
        poison: float = float("nan") if place.uses_kernels else 0.0
        if self.is_e4m3:
            caches, poison = caches.to(torch.float8_e4m3fn), _E4M3_NAN
        raw = caches.view(torch.uint8) if self.is_e4m3 else caches
        raw[:, unused] = poison
        raw[:, [table[-1] for table in tables], :, num_in_last:] = poison
        return caches[0], caches[1]

    def _call(
        self,
        place: Place,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        segments: tuple[Segment, ...],
    ) -> Call:
        dims, scale = self.dims, self.dims.head_dim**-0.5
        if not place.uses_kernels:
            groups = attention_groups(segments, dims.block_size, None)
            return lambda: (reference.tree_attention(q, k_cache, v_cache, groups, scale),)

        from specdec.kernels import tree_attention

        shape = tile_shape(
            segments,
            num_heads=dims.num_heads,
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            itemsize=q.dtype.itemsize,
            is_deterministic=self.is_deterministic,
            processors=Processors.of(place.device),
        )
        tiles = make_tiles(segments, shape, num_rows=len(q), device=place.device)
        scales = torch.ones(dims.num_kv_heads, device=place.device) if self.is_e4m3 else None

        def run() -> Results:
            out = tree_attention.tree_attention(
                q, k_cache, v_cache, tiles, scale=scale, k_scales=scales, v_scales=scales
            )
            return (out,)

        return run

    def _expect(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, segments: Sequence[Segment]
    ) -> Sequence[Expected]:
        parts = [partial(self._dense, q, k_cache, v_cache, segment) for segment in segments]
        exact = torch.cat([part(torch.float64) for part in parts])
        return [Expected(exact, torch.cat([part(self.dtype) for part in parts]))]

    def _dense(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, segment: Segment, dtype: torch.dtype
    ) -> Tensor:
        """Full softmax of one request, key head by key head. Returns [nodes, heads, dim]."""
        dims, num_places = self.dims, self.context + self.nodes
        group = dims.num_heads // dims.num_kv_heads
        blocks = torch.tensor(segment.block_ids, device=q.device)
        rows = q[segment.start : segment.start + self.nodes].to(dtype)
        masks = segment.ancestors or (1,)
        own = [[mask >> node & 1 == 1 for node in range(self.nodes)] for mask in masks]
        is_hidden = torch.zeros(self.nodes, num_places, dtype=torch.bool, device=q.device)
        is_hidden[:, self.context :] = ~torch.tensor(own, device=q.device)
        out = torch.empty_like(rows)
        for head in range(dims.num_kv_heads):
            k, v = (self._keys(c, blocks, head)[:num_places].to(dtype) for c in (k_cache, v_cache))
            heads = slice(head * group, (head + 1) * group)
            packed = rows[:, heads].transpose(0, 1).reshape(-1, dims.head_dim)
            scores = (packed @ k.T * dims.head_dim**-0.5).view(group, self.nodes, num_places)
            weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1).flatten(0, 1)
            out[:, heads] = (weights @ v).view(group, self.nodes, -1).transpose(0, 1)
        return out

    def _keys(self, cache: Tensor, blocks: Tensor, head: int) -> Tensor:
        """One head's rows of a cache in the order of places; 8-bit floats are picked as bytes."""
        raw = cache.view(torch.uint8) if self.is_e4m3 else cache
        return raw[blocks, head].flatten(0, 1).view(cache.dtype)
