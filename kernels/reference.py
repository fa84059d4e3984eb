"""Plain PyTorch forms of every op of the forward pass: the specification and the CPU path.

Row invariance: a row's result depends on that row alone, bit for bit, whatever stands beside it in
the batch. So (docs/adr/0003)
- matrix products see between `min_rows` and ROW_TILE rows, a range in which they were found equal;
- attention sums keys tile by tile, tiles being aligned to absolute positions, and adds tiles in a
  fixed order;
- everything else is elementwise, or reduces over a dimension of fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.attention_group import AttentionGroup

TILES_PER_SUM = 16  # tiles are added in groups of this fixed size, then group by group
MIN_PRODUCT_ROWS = 8  # attention products are padded to this many rows
_SERIAL_NUMEL = 32767  # above this torch splits an elementwise op between threads, mid-row


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * weight / sqrt(mean(x^2) + eps), in fp32 (Zhang & Sennrich 2019). x: [..., dim]."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of each head by position (Su et al. 2021, the half-split layout).

    x: fp32 [num_rows, num_heads, head_dim]; cos, sin: [num_rows, 1, head_dim], `sin` negative in
    the first half: out = x * cos + swap(x) * sin.
    """
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return x * cos + swapped * sin


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for fused [num_rows, 2 * dim]; returns [num_rows, dim]."""
    dim = gate_up.shape[1] // 2
    slabs = gate_up.split(max(1, _SERIAL_NUMEL // dim))
    parts = [torch.nn.functional.silu(s[:, :dim]) * s[:, dim:] for s in slabs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def write_kv(k_cache: Tensor, v_cache: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Write keys and values of new tokens to their slots.

    caches: [num_blocks, num_kv_heads, block_size, head_dim]; k, v: [num_tokens, num_kv_heads,
    head_dim]; rows: their places in the flattened cache, `slot_rows(slots, ...).flatten()`.
    """
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.view(-1, cache.shape[3]).index_copy_(0, rows, new.reshape(-1, cache.shape[3]))


def slot_rows(slots: Tensor, num_kv_heads: int, block_size: int) -> Tensor:
    """Rows of the flattened cache [num_blocks * num_kv_heads * block_size, head_dim].

    slots: int64 [...]. Returns int64 [..., num_kv_heads].
    """
    first = slots // block_size * (num_kv_heads * block_size) + slots % block_size
    heads = torch.arange(num_kv_heads, device=slots.device) * block_size
    return first[..., None] + heads


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, groups: Sequence[AttentionGroup], scale: float
) -> Tensor:
    """Attention of query rows over the paged cache, ancestors only within a draft tree.

    q: fp32 [num_rows, num_heads, head_dim]; caches: [num_blocks, num_kv_heads, block_size,
    head_dim], the rows' own keys and values written already. Returns fp32, the shape of q; rows
    that belong to no group are zero.
    """
    q = q * scale
    out = torch.zeros_like(q)
    for group in groups:
        rows = slice(group.start, group.end)
        _attend(q[rows], k_cache, v_cache, group, out[rows])
    return out


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, group: AttentionGroup, out: Tensor
) -> None:
    """Write one group's attention to `out`, of q's shape [n, num_heads, head_dim]."""
    n, num_heads, dim = q.shape
    num_kv_heads = k_cache.shape[1]
    num_packed = num_heads // num_kv_heads * n
    per_row = q.view(n, num_kv_heads, -1, dim)
    scores: list[Tensor] = []  # parts [tiles, kv, padded rows, tile]
    values: list[Tensor] = []  # parts [tiles, kv, padded rows, dim]
    if group.num_blocks:
        k, v = k_cache[group.blocks], v_cache[group.blocks]  # [tiles, kv, tile, dim]
        # All rows and query heads of a key head are packed into one product: keys are read once.
        num_padded = max(num_packed, MIN_PRODUCT_ROWS)
        packed = q.new_zeros(group.num_blocks, num_kv_heads, num_padded, dim)
        packed[:, :, :num_packed].unflatten(2, (n, -1)).copy_(per_row.transpose(0, 1))
        scores.append(_shared_product(packed, k.transpose(2, 3)))
    if group.tail_slots is not None:
        k_tail, v_tail = _gather_tail(k_cache, v_cache, group.tail_slots)
        scores.append(_tail_product(per_row.unsqueeze(1), k_tail.transpose(3, 4)))

    weights = scores[0] if len(scores) == 1 else torch.cat(scores)
    masked = weights[-len(group.bias) :, :, :num_packed].unflatten(2, (n, -1))
    masked += group.bias.unsqueeze(3)
    weights = weights.sub_(weights.amax((0, 3), keepdim=True)).exp_()

    if group.num_blocks:
        values.append(_shared_product(weights[: group.num_blocks], v))
    if group.tail_slots is not None:
        tail = weights[group.num_blocks :, :, :num_packed].unflatten(2, (n, -1))
        values.append(_tail_product(tail.permute(2, 0, 1, 3, 4), v_tail))
    mixed = _weighted_mean(values, weights.sum(-1))[:, :num_packed]
    out.view_as(per_row).copy_(mixed.unflatten(1, (n, -1)).transpose(0, 1))


def _padded(x: Tensor) -> Tensor:
    """Pad the rows [..., rows, dim] of a product to MIN_PRODUCT_ROWS."""
    missing = MIN_PRODUCT_ROWS - x.shape[-2]
    return x if missing <= 0 else torch.nn.functional.pad(x, (0, 0, 0, missing))


def _gather_tail(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of each row's own tail: two of [n, num_tail, kv, tile, dim]."""
    num_kv_heads, tile, dim = k_cache.shape[1:]
    rows = slot_rows(slots.view(slots.shape[0], -1, tile), num_kv_heads, tile)
    index = rows.transpose(-1, -2)  # [n, num_tail, kv, tile]
    flat = index.flatten()
    k = k_cache.view(-1, dim).index_select(0, flat)
    v = v_cache.view(-1, dim).index_select(0, flat)
    return k.view(*index.shape, dim), v.view(*index.shape, dim)


def _shared_product(rows: Tensor, columns: Tensor) -> Tensor:
    """Packed rows [tiles, kv, rows, a] times shared tiles [tiles, kv, a, b]."""
    product = torch.bmm(rows.flatten(0, 1), columns.flatten(0, 1))
    return product.view(*columns.shape[:2], rows.shape[2], -1)


def _tail_product(rows: Tensor, columns: Tensor) -> Tensor:
    """Each row's small product with tiles of its own.

    rows: [n, tiles or 1, kv, ratio, a]; columns: [n, tiles, kv, a, b].
    Returns [tiles, kv, padded n * ratio, b], packed like the shared product.
    """
    n, num_tiles, num_kv_heads, _, b = columns.shape
    ratio = rows.shape[3]
    left = _padded(rows).expand(-1, num_tiles, -1, -1, -1).flatten(0, 2)
    product = torch.bmm(left, columns.flatten(0, 2))[:, :ratio]
    product = product.view(n, num_tiles, num_kv_heads, ratio, b).permute(1, 2, 0, 3, 4)
    return _padded(product.reshape(num_tiles, num_kv_heads, n * ratio, b))


def _weighted_mean(values: list[Tensor], totals: Tensor) -> Tensor:
    """Sum over tiles of values over that of totals.

    values: parts [tiles, kv, rows, dim]; totals: [tiles, kv, rows]. (`torch.sum` would pick its
    order by the shape.)
    """
    tiles = values[0] if len(values) == 1 else torch.cat(values)
    return _ordered_sum(tiles) / _ordered_sum(totals.unsqueeze(3))


def _ordered_sum(tiles: Tensor) -> Tensor:
    """Sum over tiles [num_tiles, ...], elementwise and in an order set by the tiles' positions.

    Groups of TILES_PER_SUM are folded in halves (tile i takes tile i + 8, then i + 4, ...), then
    added one by one. A tile that is not there counts as zero and is skipped, so neither more rows
    nor empty tiles change a bit. Overwrites its argument.
    """
    num_full = len(tiles) // TILES_PER_SUM * TILES_PER_SUM
    sums: list[Tensor] = []
    if num_full:
        sums += _fold(tiles[:num_full].unflatten(0, (-1, TILES_PER_SUM))).unbind()
    if num_full < len(tiles):
        sums += _fold(tiles[None, num_full:]).unbind()
    total = sums[0]
    for more in sums[1:]:
        total = total + more
    return total


def _fold(groups: Tensor) -> Tensor:
    """Sum of [num_groups, at most TILES_PER_SUM tiles, ...] over its tiles, in place."""
    size, half = groups.shape[1], TILES_PER_SUM // 2
    while half:
        if size > half:
            groups[:, : size - half] += groups[:, half:size]
            size = half
        half //= 2
    return groups[:, 0]
