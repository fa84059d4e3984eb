"""Paged: rows of several requests over scattered blocks, NaN wherever none of them may read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from specdec.kernels import reference, tree_attention
from specdec.kernels.attention_group import attention_groups
from specdec.kernels.attention_tiles import (
    AttentionTiles,
    Processors,
    TileShape,
    make_tiles,
    tile_shape,
)
from specdec.kernels.segment import Segment, ancestor_masks
from tests.kernels.device import DEVICE, randn

MARGIN = 4096  # numbers on either side of a result that no kernel may write


def random_parents(num_nodes: int, reach: int, seed: int) -> tuple[int, ...]:
    """A tree in which no parent is more than `reach` nodes before its child."""
    rng = random.Random(seed)
    return (-1, *(rng.randrange(max(0, node - reach), node) for node in range(1, num_nodes)))


@dataclass(frozen=True)
class Rows:
    """Rows of one request after `root` committed positions: a chain, or the tree of `parents`.

    q: [num_rows, num_heads, head_dim]; k, v: [root + num_rows, num_kv_heads, head_dim], by place.
    """

    root: int
    parents: tuple[int, ...] | None
    q: Tensor
    k: Tensor
    v: Tensor

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`."""
        assert self.parents is not None
        path = [node]
        while path[-1]:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def take(self, root: int, nodes: Sequence[int], parents: tuple[int, ...] | None) -> Rows:
        """These nodes behind the first `root` places."""
        places = [*range(root), *(self.root + node for node in nodes)]
        return Rows(root, parents, self.q[list(nodes)], self.k[places], self.v[places])

    def permuted(self, seed: int) -> tuple[Rows, list[int]]:
        """The same tree with its nodes in another order, and that order; parents come first."""
        assert self.parents is not None
        rng, order, ready = random.Random(seed), list[int](), [0]
        while ready:
            order.append(ready.pop(rng.randrange(len(ready))))
            ready += [node for node, parent in enumerate(self.parents) if parent == order[-1]]
        parents = (-1, *(order.index(self.parents[node]) for node in order[1:]))
        return self.take(self.root, order, parents), order

    def committed(self, path: Sequence[int], num_accepted: int) -> tuple[Rows, list[int]]:
        """The tree below a node of the path once those before it are committed; its nodes' names.

        Example: accepted are nodes 0 and 2 of path 0, 2, 5, 6: the new root was node 5.
        """
        assert self.parents is not None
        nodes = [n for n in range(len(self.q)) if path[num_accepted] in self.path(n)]
        parents = (-1, *(nodes.index(self.parents[node]) for node in nodes[1:]))
        moved = self.take(self.root, [*path[:num_accepted], *nodes], parents)
        return replace(moved, root=self.root + num_accepted, q=self.q[nodes]), nodes


def random_rows(
    root: int,
    rows: int | tuple[int, ...],
    *,
    num_kv_heads: int = 1,
    group: int = 1,
    head_dim: int = 16,
    seed: int = 0,
) -> Rows:
    """Normal q, k and v; `rows` is the length of a chain or the parents of a tree."""
    num_rows = rows if isinstance(rows, int) else len(rows)
    q = randn(num_rows, num_kv_heads * group, head_dim, seed=3 * seed)
    k, v = (randn(root + num_rows, num_kv_heads, head_dim, seed=3 * seed + i).cpu() for i in (1, 2))
    return Rows(root, None if isinstance(rows, int) else rows, q.cpu(), k, v)


@dataclass(frozen=True)
class Paged:
    """One step: its segments, their queries and the cache, on the CPU."""

    segments: tuple[Segment, ...]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    window: int | None

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def to(self, dtype: torch.dtype) -> Paged:
        return replace(
            self, q=self.q.to(dtype), k_cache=self.k_cache.to(dtype), v_cache=self.v_cache.to(dtype)
        )

    def shape(self, is_deterministic: bool, num_processors: int = 1, **changes: int) -> TileShape:
        """The shape that `tile_shape` gives, but for `changes`."""
        shape = tile_shape(
            self.segments,
            num_heads=self.q.shape[1],
            num_kv_heads=self.k_cache.shape[1],
            head_dim=self.q.shape[2],
            itemsize=self.q.dtype.itemsize,
            is_deterministic=is_deterministic,
            processors=Processors(num_processors, True),
        )
        return replace(shape, **changes)

    def run(
        self,
        shape: TileShape,
        *,
        scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
        garbage: int | None = None,
    ) -> Tensor:
        """What the kernels give; `garbage` stands in the tables beyond a request's blocks."""
        tiles = make_tiles(self.segments, shape, num_rows=len(self.q), device=DEVICE)
        if garbage is not None:
            tables = torch.nn.functional.pad(tiles.block_tables, (0, 3))
            for index in range(len(tables)):
                used = len(self.segments[index].block_ids) if index < len(self.segments) else 0
                tables[index, used:] = garbage
            tiles = replace(tiles, block_tables=tables)
        return self.run_tiles(tiles, scales=scales)

    def run_tiles(
        self,
        tiles: AttentionTiles,
        *,
        scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    ) -> Tensor:
        """The same from the tables, [num_rows, num_heads, head_dim] on the CPU."""
        k_scales, v_scales = (None if s is None else s.to(DEVICE) for s in scales)
        with poisoned_results():
            return tree_attention.tree_attention(
                self.q.to(DEVICE),
                self.k_cache.to(DEVICE),
                self.v_cache.to(DEVICE),
                tiles,
                scale=self.scale,
                window=self.window,
                k_scales=k_scales,
                v_scales=v_scales,
            ).cpu()

    def want(self) -> Tensor:
        """The reference in fp32."""
        q, k_cache, v_cache = (x.float().nan_to_num() for x in (self.q, self.k_cache, self.v_cache))
        groups = attention_groups(self.segments, k_cache.shape[2], self.window)
        return reference.tree_attention(q, k_cache, v_cache, groups, self.scale)

    def dense(self) -> Tensor:
        """Plain PyTorch in the dtype of the queries; rows without a segment are zero."""
        out = torch.zeros_like(self.q)
        block_size = self.k_cache.shape[2]
        group = self.q.shape[1] // self.k_cache.shape[1]
        for s in self.segments:
            rows, places = slice(s.start, s.start + s.num_rows), torch.arange(s.root + s.num_rows)
            blocks = torch.tensor(s.block_ids)[places // block_size]
            k, v = (
                c[blocks, :, places % block_size].to(self.q.dtype).nan_to_num()
                for c in (self.k_cache, self.v_cache)
            )
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("rhd,khd->hrk", self.q[rows], k) * self.scale
            weights = scores.masked_fill(~visible(s, self.window), float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hrk,khd->rhd", weights, v)
        return out


def visible(segment: Segment, window: int | None) -> Tensor:
    """[num_rows, root + num_rows]: which places a row attends to, bit by bit."""
    n, root = segment.num_rows, segment.root
    masks = segment.ancestors or [(2 << row) - 1 for row in range(n)]
    own = torch.tensor([[mask >> node & 1 == 1 for node in range(n)] for mask in masks])
    mask = torch.cat((torch.ones(n, root, dtype=torch.bool), own), 1)
    reach = torch.tensor([root + mask.bit_count() - 1 for mask in masks])
    places = torch.cat((torch.arange(root), reach))  # as positions
    return mask if window is None else mask & (places > reach[:, None] - window)


def lay(
    parts: Sequence[Rows],
    *,
    block_size: int = 16,
    window: int | None = None,
    num_padding: int = 0,
    seed: int = 0,
) -> Paged:
    """Lay out requests one behind the other, in blocks that no two of them share.

    NaN: block 0, blocks of nobody, the rest of each last block, what lies behind all windows, and
    the queries of the padding.
    """
    rng = random.Random(seed)
    needed = [-(-len(rows.k) // block_size) + rng.randrange(2) for rows in parts]
    free = list(range(1, sum(needed) + 3))
    rng.shuffle(free)
    num_kv_heads, head_dim = parts[0].k.shape[1:]
    caches = torch.full((2, len(free) + 1, num_kv_heads, block_size, head_dim), float("nan"))
    segments, start = [], 0
    for rows, num_blocks in zip(parts, needed, strict=True):
        block_ids, free = free[:num_blocks], free[num_blocks:]
        masks = None if rows.parents is None else ancestor_masks(rows.parents)
        segments.append(Segment(start, len(rows.q), rows.root, block_ids, masks))
        start += len(rows.q)
        first = 0 if window is None else max(0, rows.root - window + 1)
        places = torch.arange(first, len(rows.k))
        blocks = torch.tensor(block_ids)[places // block_size]
        for cache, values in zip(caches, (rows.k, rows.v), strict=True):
            cache[blocks, :, places % block_size] = values[first:]
    padding = torch.full((num_padding, *parts[0].q.shape[1:]), float("nan"))
    q = torch.cat([*(rows.q for rows in parts), padding])
    return Paged(tuple(segments), q, caches[0], caches[1], window)


@contextmanager
def poisoned_results() -> Iterator[None]:
    """Within it results and partial sums begin as NaN, and nothing around them may be written."""
    around: list[Tensor] = []

    def empty(*shape: Any, **options: Any) -> Tensor:
        inner = torch.empty(*shape, **options)
        whole = inner.new_full((inner.numel() + 2 * MARGIN,), float("nan"))
        around.extend((whole[:MARGIN], whole[-MARGIN:]))
        return whole[MARGIN:-MARGIN].view(inner.shape)

    def empty_like(x: Tensor) -> Tensor:
        return empty(x.shape, dtype=x.dtype, device=x.device)

    class Torch:
        """The module's `torch`, but for what allocates."""

        def __getattr__(self, name: str) -> Any:
            return {"empty": empty, "empty_like": empty_like}.get(name, getattr(torch, name))

    with patch.object(tree_attention, "torch", Torch()):
        yield
    assert around
    assert all(margin.isnan().all() for margin in around)
