"""The Triton kernels of tree attention: flash-decoding with splits, ancestor words and a merge.

Three parts (docs/kernels.md): `attend` folds a range of shared keys, and where it is the last
range also the tree's own keys, into a partial softmax per row; `attend_tail` continues it row by
row for branching trees in deterministic mode; `merge` adds the partial softmaxes of all ranges.
All rows of a tile share their loads, so that keys and values are read once per tile of nodes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.e4m3 import E4M3_SHIFT, from_e4m3

_E4M3_SHIFT = tl.constexpr(E4M3_SHIFT)  # a kernel reads no other globals


@triton.jit
def _load_keys(
    cache, table, place, is_key, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_E4M3: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Keys or values [BLOCK_N, BLOCK_D] at places of a request; zero where `is_key` is false."""
    block = tl.load(table + place // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE
    dim = tl.arange(0, BLOCK_D)
    mask = is_key[:, None] & (dim < HEAD_DIM)[None, :]
    # Zero, not garbage: a weight of 0 times NaN would be NaN.
    values = tl.load(cache + row[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0)
    if IS_E4M3:
        return from_e4m3(values).to(DTYPE)
    return values.to(DTYPE)


@triton.jit
def _fold(q, k, v, is_visible, scale, top, mass, acc):
    """Add one tile of keys to a running softmax (Milakov & Gimelshein 2018), in base 2.

    A tile without a visible key changes no bit: the old sums are multiplied by exactly 1.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(is_visible, scores, float("-inf"))
    m_new = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    mass = mass * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return m_new, mass, acc


# The number of rows varies from step to step: compile once, not again where it is 1.
@triton.jit(do_not_specialize=("window", "total_rows", "table_stride"))
def attend(
    q, k_cache, v_cache, k_scales, v_scales, out, partial_acc, partial_ml,
    tile_segments, tile_rows, first_rows, num_rows, roots, shared_lens, num_own, block_tables,
    positions, ancestors, scale, window, total_rows, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr, SPLIT_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IS_E4M3: tl.constexpr, IS_DIRECT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One tile of rows, one key head, one split of the keys."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    segment = tl.load(tile_segments + tile)
    shared, own = tl.load(shared_lens + segment), tl.load(num_own + segment)
    first, root = tl.load(first_rows + segment), tl.load(roots + segment)
    table = block_tables + segment * table_stride

    lane = tl.arange(0, BLOCK_M)
    node = tl.load(tile_rows + tile) + lane // GROUP
    is_row = (node < tl.load(num_rows + segment)) & (lane < BLOCK_M // GROUP * GROUP)
    row = first + node
    head = kv_head * GROUP + lane % GROUP
    position = tl.load(positions + row, mask=is_row, other=-1)
    dim = tl.arange(0, BLOCK_D)
    is_dim = (dim < HEAD_DIM)[None, :]
    place_of_row = row * (NUM_KV_HEADS * GROUP) + head  # of [num_rows, num_heads]
    offsets = place_of_row[:, None] * HEAD_DIM + dim[None, :]  # a step's rows fit 32 bits
    queries = tl.load(q + offsets, mask=is_row[:, None] & is_dim, other=0.0)
    if IS_E4M3:
        scale *= tl.load(k_scales + kv_head)

    # The range of shared positions [low, high) is the segment's business alone; what of it no row
    # of the tile can see is skipped.
    high = tl.minimum(shared, tl.max(position) + 1)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(root - window + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT_SIZE > 0:
        low = tl.maximum(low, split * SPLIT_SIZE)
        high = tl.minimum(high, split * SPLIT_SIZE + SPLIT_SIZE)
    else:
        part = tl.cdiv(tl.cdiv(shared - low, BLOCK_N), num_splits) * BLOCK_N
        low = low + split * part
        high = tl.minimum(high, low + part)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        is_key = key < high
        k = _load_keys(k_cache, table, key, is_key, kv_head, NUM_KV_HEADS, BLOCK_SIZE,
                       HEAD_DIM, BLOCK_D, IS_E4M3, DTYPE)  # fmt: skip
        is_value = is_key
        if HAS_WINDOW:
            is_value &= key > root - window  # behind all rows' windows: any bits, NaN too
        v = _load_keys(v_cache, table, key, is_value, kv_head, NUM_KV_HEADS, BLOCK_SIZE,
                       HEAD_DIM, BLOCK_D, IS_E4M3, DTYPE)  # fmt: skip
        is_visible = is_key[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_visible &= key[None, :] > position[:, None] - window
        top, mass, acc = _fold(queries, k, v, is_visible, scale, top, mass, acc)

    if SPLIT_SIZE == 0:  # a branching tree's own keys
        own = tl.where(split == num_splits - 1, own, 0)
        for start in range(0, own, BLOCK_N):
            column = start + tl.arange(0, BLOCK_N)
            is_key = column < own
            k = _load_keys(k_cache, table, root + column, is_key, kv_head, NUM_KV_HEADS,
                           BLOCK_SIZE, HEAD_DIM, BLOCK_D, IS_E4M3, DTYPE)  # fmt: skip
            v = _load_keys(v_cache, table, root + column, is_key, kv_head, NUM_KV_HEADS,
                           BLOCK_SIZE, HEAD_DIM, BLOCK_D, IS_E4M3, DTYPE)  # fmt: skip
            word = tl.load(ancestors + row * WORDS + start // 64, mask=is_row, other=0)
            shift = (start % 64 + tl.arange(0, BLOCK_N)).to(tl.int64)
            is_visible = (((word[:, None] >> shift[None, :]) & 1) != 0) & is_key[None, :]
            if HAS_WINDOW:
                key = tl.load(positions + first + column, mask=is_key, other=0)
                is_visible &= key[None, :] > position[:, None] - window
            top, mass, acc = _fold(queries, k, v, is_visible, scale, top, mass, acc)

    if IS_DIRECT:
        mean = tl.where(mass[:, None] > 0, acc / tl.where(mass > 0, mass, 1.0)[:, None], 0.0)
        if IS_E4M3:
            mean *= tl.load(v_scales + kv_head) * _E4M3_SHIFT
        tl.store(out + offsets, mean.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim)
    else:
        _store_state(partial_acc, partial_ml, split, total_rows, place_of_row, is_row, top, mass,
                     acc, NUM_KV_HEADS * GROUP, HEAD_DIM, BLOCK_D)  # fmt: skip


@triton.jit
def _store_state(
    partial_acc, partial_ml, split, total_rows, place_of_row, is_row, top, mass, acc,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keep a partial softmax: its maximum, its sum and its unnormalised mean."""
    place = total_rows.to(tl.int64) * NUM_HEADS * split + place_of_row
    tl.store(partial_ml + place * 2, top, mask=is_row)
    tl.store(partial_ml + place * 2 + 1, mass, mask=is_row)
    dim = tl.arange(0, BLOCK_D)
    # An empty part is known by its sum; its mean is neither written nor read.
    mask = (is_row & (mass > 0))[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(partial_acc + place[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=("window", "total_rows", "table_stride"))
def attend_tail(
    q, k_cache, v_cache, k_scales, partial_acc, partial_ml, tail_rows, tail_segments,
    first_rows, num_rows, roots, shared_lens, block_tables, positions, ancestors,
    scale, window, total_rows, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr, SPLIT_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IS_E4M3: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One row of a branching tree, one key head: the keys after the shared ones, by position.

    Tiles and splits are those that the row would meet had its path been committed, and the running
    softmax goes on from the one that `attend` stored: the same operations in the same order.
    """
    row = tl.load(tail_rows + tl.program_id(0))  # -1: padding, which stores nothing
    segment = tl.load(tail_segments + tl.program_id(0))
    kv_head = tl.program_id(1)
    first, root = tl.load(first_rows + segment), tl.load(roots + segment)
    shared, nodes = tl.load(shared_lens + segment), tl.load(num_rows + segment)
    position = tl.load(positions + row, mask=row >= 0, other=-1)
    table = block_tables + segment * table_stride

    lane = tl.arange(0, BLOCK_M)
    is_row = (lane < GROUP) & (lane * 0 + row >= 0)  # the interpreter's masks are no scalars
    place_of_row = row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + lane
    dim = tl.arange(0, BLOCK_D)
    is_state = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    offsets = place_of_row[:, None] * HEAD_DIM + dim[None, :]
    queries = tl.load(q + offsets, mask=is_state, other=0.0)
    if IS_E4M3:
        scale *= tl.load(k_scales + kv_head)

    # Which nodes are the row's ancestors, and where they stand.
    column = tl.arange(0, WORDS * 64)
    word = tl.load(ancestors + row * WORDS + column // 64, mask=column * 0 + row >= 0, other=0)
    is_ancestor = (((word >> (column % 64).to(tl.int64)) & 1) != 0) & (column < nodes)
    depth_position = tl.load(positions + first + column, mask=is_ancestor, other=-1)

    for split in range(shared // SPLIT_SIZE, position // SPLIT_SIZE + 1):
        low = tl.maximum(shared, split * SPLIT_SIZE)
        high = tl.minimum(position + 1, split * SPLIT_SIZE + SPLIT_SIZE)
        is_begun = is_row & (lane * 0 + low > split * SPLIT_SIZE)
        state = total_rows.to(tl.int64) * (NUM_KV_HEADS * GROUP) * split + place_of_row
        top = tl.load(partial_ml + state * 2, mask=is_begun, other=float("-inf"))
        mass = tl.load(partial_ml + state * 2 + 1, mask=is_begun, other=0.0)
        acc = tl.load(partial_acc + state[:, None] * HEAD_DIM + dim[None, :],
                      mask=is_state & (is_begun & (mass > 0))[:, None], other=0.0)  # fmt: skip
        for start in range(low, high, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            is_key = key < high
            if HAS_WINDOW:
                is_key &= key > position - window
            is_own = is_ancestor[None, :] & (depth_position[None, :] == key[:, None])
            ancestor = tl.sum(tl.where(is_own, column[None, :], 0), 1)
            place = tl.where(key < root, key, root + ancestor)
            k = _load_keys(k_cache, table, place, is_key, kv_head, NUM_KV_HEADS, BLOCK_SIZE,
                           HEAD_DIM, BLOCK_D, IS_E4M3, DTYPE)  # fmt: skip
            v = _load_keys(v_cache, table, place, is_key, kv_head, NUM_KV_HEADS, BLOCK_SIZE,
                           HEAD_DIM, BLOCK_D, IS_E4M3, DTYPE)  # fmt: skip
            is_visible = is_row[:, None] & is_key[None, :]
            top, mass, acc = _fold(queries, k, v, is_visible, scale, top, mass, acc)
        _store_state(partial_acc, partial_ml, split, total_rows, place_of_row, is_row, top, mass,
                     acc, NUM_KV_HEADS * GROUP, HEAD_DIM, BLOCK_D)  # fmt: skip


@triton.jit(do_not_specialize=("num_splits", "total_rows"))
def merge(
    partial_acc, partial_ml, v_scales, out, num_splits, total_rows,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """One row and the query heads of one key head: partial softmaxes in the order of the splits."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    is_head = lane < GROUP
    first = row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + lane
    stride = total_rows.to(tl.int64) * (NUM_KV_HEADS * GROUP)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for split in range(num_splits):
        top = tl.load(partial_ml + (first + split * stride) * 2, mask=is_head, other=float("-inf"))
        peak = tl.maximum(peak, top)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([BLOCK_G], tl.float32)
    mean = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for split in range(num_splits):
        state = first + split * stride
        top = tl.load(partial_ml + state * 2, mask=is_head, other=float("-inf"))
        mass = tl.load(partial_ml + state * 2 + 1, mask=is_head, other=0.0)
        mask = (is_head & (mass > 0))[:, None] & (dim < HEAD_DIM)[None, :]
        acc = tl.load(partial_acc + state[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        weight = tl.exp2(top - peak)
        total += weight * mass
        mean += weight[:, None] * acc
    mean = tl.where(total[:, None] > 0, mean / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    if IS_E4M3:
        mean *= tl.load(v_scales + kv_head) * _E4M3_SHIFT
    mask = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out + first[:, None] * HEAD_DIM + dim[None, :], mean.to(out.dtype.element_ty), mask)
