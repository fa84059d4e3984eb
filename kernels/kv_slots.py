"""Triton kernels that write keys and values to slots of the KV cache, and move accepted ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.e4m3 import to_e4m3
from specdec.kernels.variant import Variant

HEADS_PER_PROGRAM = 4
MOVE_BYTES = 8192  # a chunk of moves: what one warp holds in registers without spilling
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes per number


@triton.jit
def _store_halves(
    out: tl.tensor,
    places: tl.tensor,
    mask: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    tl.store(out + places, low.to(out.dtype.element_ty), mask=mask)
    tl.store(out + places + HALF, high.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _cache_halves(
    cache: tl.tensor,
    scales: tl.tensor,
    heads: tl.tensor,
    slot: tl.tensor,
    lanes: tl.tensor,
    mask: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_E4M3: tl.constexpr,
) -> None:
    rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    places = rows[:, None] * (2 * HALF) + lanes[None, :]
    if IS_E4M3:
        is_head = (heads >= 0) & (heads < NUM_KV_HEADS)
        scale = tl.load(scales + heads, mask=is_head, other=1.0)[:, None]
        low, high = to_e4m3(tl.math.div_rn(low, scale)), to_e4m3(tl.math.div_rn(high, scale))
    _store_halves(cache, places, mask, low, high, HALF)


@triton.jit
def _rope_write(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    q_out: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_E4M3: tl.constexpr,
) -> None:
    half: tl.constexpr = HEAD_DIM // 2
    num_rotated: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lanes = tl.arange(0, LANES)
    inside = lanes < half
    is_q = heads < NUM_HEADS
    is_rotated = heads < num_rotated
    is_head = heads < num_rotated + NUM_KV_HEADS

    mask = is_head[:, None] & inside[None, :]
    first = (row * (num_rotated + NUM_KV_HEADS) + heads)[:, None] * HEAD_DIM + lanes[None, :]
    low = tl.load(qkv + first, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(qkv + first + half, mask=mask, other=0.0).to(tl.float32)

    normed_low, normed_high = low, high
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / HEAD_DIM + eps)[:, None]
        q_low = tl.load(q_norm + lanes, mask=inside, other=0.0)[None, :]
        q_high = tl.load(q_norm + half + lanes, mask=inside, other=0.0)[None, :]
        k_low = tl.load(k_norm + lanes, mask=inside, other=0.0)[None, :]
        k_high = tl.load(k_norm + half + lanes, mask=inside, other=0.0)[None, :]
        normed_low = low * scale * tl.where(is_q[:, None], q_low, k_low)
        normed_high = high * scale * tl.where(is_q[:, None], q_high, k_high)

    angle = tl.load(positions + row).to(tl.int64) * HEAD_DIM + lanes
    cos_low = tl.load(cos + angle, mask=inside, other=0.0)[None, :]
    cos_high = tl.load(cos + angle + half, mask=inside, other=0.0)[None, :]
    sin_low = tl.load(sin + angle, mask=inside, other=0.0)[None, :]
    sin_high = tl.load(sin + angle + half, mask=inside, other=0.0)[None, :]
    rotated_low = normed_low * cos_low + normed_high * sin_low
    rotated_high = normed_high * cos_high + normed_low * sin_high
    low = tl.where(is_rotated[:, None], rotated_low, low)
    high = tl.where(is_rotated[:, None], rotated_high, high)

    places = (row * NUM_HEADS + heads)[:, None] * HEAD_DIM + lanes[None, :]
    _store_halves(q_out, places, mask & is_q[:, None], low, high, half)
    # A 64-bit slot makes every address below 64-bit: caches have more than 2^31 numbers.
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        is_k = is_rotated & (heads >= NUM_HEADS)
        _cache_halves(
            k_cache, k_scale, heads - NUM_HEADS, slot, lanes, mask & is_k[:, None], low, high,
            NUM_KV_HEADS, half, BLOCK_SIZE, IS_E4M3,
        )  # fmt: skip
        is_v = heads >= num_rotated
        _cache_halves(
            v_cache, v_scale, heads - num_rotated, slot, lanes, mask & is_v[:, None], low, high,
            NUM_KV_HEADS, half, BLOCK_SIZE, IS_E4M3,
        )  # fmt: skip


# Not specialised: the number of moves changes with every step.
@triton.jit(do_not_specialize=["num_blocks", "num_moves"])
def _move_slots(
    data: tl.tensor,
    src: tl.tensor,
    dst: tl.tensor,
    num_blocks: tl.tensor,
    num_moves: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    # This layer's keys or values of this head, in block 0.
    first = tl.program_id(0) * num_blocks * NUM_KV_HEADS + tl.program_id(1)
    lanes = tl.arange(0, LANES)
    # Chunks go from left to right. A destination may be the source of an earlier move, which has
    # been read by then. It is never that of a later one: a request's later sources are the slots of
    # nodes deeper on its path, whose index is at least their depth, and earlier destinations are
    # the slots of smaller depths. Requests share no slots.
    for start in range(0, num_moves, CHUNK):
        index = start + tl.arange(0, CHUNK)
        is_move = index < num_moves
        mask = is_move[:, None] & (lanes < HEAD_DIM)[None, :]
        source = tl.load(src + index, mask=is_move, other=0).to(tl.int64)
        target = tl.load(dst + index, mask=is_move, other=0).to(tl.int64)
        source = (first + source // BLOCK_SIZE * NUM_KV_HEADS) * BLOCK_SIZE + source % BLOCK_SIZE
        target = (first + target // BLOCK_SIZE * NUM_KV_HEADS) * BLOCK_SIZE + target % BLOCK_SIZE
        moved = tl.load(data + source[:, None] * HEAD_DIM + lanes[None, :], mask=mask)
        tl.debug_barrier()  # other lanes may still be reading what this one overwrites
        tl.store(data + target[:, None] * HEAD_DIM + lanes[None, :], moved, mask=mask)


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Norm and rotate q and k, write k and v to their slots, return q: one launch.

    qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim], head_dim even; cos, sin: tables fp32
    [max_len, head_dim] (specdec/rope.py); positions: int32 [rows], places in the tables; slots:
    int32 [rows], -1 to write nothing; of rows with equal slots any may win. Caches [num_blocks,
    num_kv_heads, block_size, head_dim] in any float dtype; float8_e4m3fn holds k / k_scale and
    v / v_scale, scales being fp32 [num_kv_heads] (to_e4m3 says how it rounds). q_norm and k_norm,
    fp32 [head_dim], go together: RMS norm of each head before the rotation (Qwen3). Rotation is
    reference.rope (Su et al. 2021). Returns [rows, num_heads, head_dim] in qkv's dtype.
    """
    num_rows = qkv.shape[0]
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    is_e4m3 = k_cache.dtype == torch.float8_e4m3fn
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
    assert head_dim % 2 == 0
    assert cos.shape[1] == head_dim
    assert cos.shape == sin.shape
    assert positions.shape == slots.shape == (num_rows,)
    assert k_cache.shape == v_cache.shape
    assert k_cache.dtype == v_cache.dtype
    assert (q_norm is None) == (k_norm is None)
    assert (k_scale is not None and v_scale is not None) == is_e4m3
    tensors = (qkv, cos, sin, positions, slots, k_cache, v_cache)
    assert all(tensor.is_contiguous() for tensor in tensors)
    if is_e4m3:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    q = torch.empty(num_rows, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)

    def pointer(tensor: Tensor | None) -> Tensor:
        """Any fp32 tensor stands for one that the kernel will not touch."""
        return cos if tensor is None else tensor

    grid = (num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM))
    _rope_write[grid](
        qkv, cos, sin, positions, slots,
        pointer(q_norm), pointer(k_norm), pointer(k_scale), pointer(v_scale),
        q, k_cache, v_cache, eps,
        num_heads, num_kv_heads, head_dim, block_size,
        HEADS_PER_PROGRAM, triton.next_power_of_2(head_dim // 2), q_norm is not None, is_e4m3,
        num_warps=1,
    )  # fmt: skip
    return q


def move_slots(data: Tensor, src: Tensor, dst: Tensor) -> None:
    """Move accepted keys and values of all requests and layers to their places: one launch.

    data: [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim] of any dtype, bits moved
    as they are; src, dst: slots, int32 [num_moves]. A request's moves stand together in the
    order of its path: the positions of sources and of destinations increase, and no source comes
    before its destination. Requests share no slots. Example: `[7, 9] -> [6, 7]`. The plain form is
    KVCache.move.
    """
    num_layers, _, num_blocks, num_kv_heads, block_size, head_dim = data.shape
    assert src.shape == dst.shape
    assert data.is_contiguous()
    if not len(src):
        return
    chunk, lanes = _move_tile(head_dim, data.dtype.itemsize)
    # One warp, because AMD's barrier holds warps back but does not wait for their loads.
    _move_slots[(2 * num_layers, num_kv_heads)](
        data.view(_RAW[data.dtype.itemsize]), src, dst, num_blocks, len(src),
        num_kv_heads, block_size, head_dim, chunk, lanes, num_warps=1,
    )  # fmt: skip


def _move_tile(head_dim: int, itemsize: int) -> tuple[int, int]:
    """Moves per chunk, and lanes of a row."""
    lanes = triton.next_power_of_2(head_dim)
    return min(32, max(1, MOVE_BYTES // (lanes * itemsize))), lanes


def variants() -> Iterator[Variant]:
    """Head sizes 64 and 128 in each pair of dtypes, with and without head norms; others once."""
    for model in ("bf16", "fp16", "fp32"):
        for cache in (model, "u8"):
            for head_dim in (64, 128):
                yield _rope_variant(model, cache, head_dim, has_norm=False)
                yield _rope_variant(model, cache, head_dim, has_norm=True)
    yield _rope_variant("bf16", "bf16", 80, has_norm=False)
    yield _rope_variant("bf16", "bf16", 256, has_norm=True)
    for itemsize in _RAW:
        for head_dim in (64, 128):
            yield _move_variant(itemsize, head_dim)
    yield _move_variant(2, 80)
    yield _move_variant(2, 256)


def _rope_variant(model: str, cache: str, head_dim: int, *, has_norm: bool) -> Variant:
    pointers = dict.fromkeys(("qkv", "q_out"), f"*{model}")
    pointers |= dict.fromkeys(("k_cache", "v_cache"), f"*{cache}")
    pointers |= dict.fromkeys(("positions", "slots"), "*i32")
    fp32 = ("cos", "sin", "q_norm", "k_norm", "k_scale", "v_scale")
    pointers |= dict.fromkeys(fp32, "*fp32")
    return Variant(
        f"rope_write {model} to {cache} {head_dim}{' norm' if has_norm else ''}",
        _rope_write,
        pointers | {"eps": "fp32"},
        {
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 16,
            "HEADS": HEADS_PER_PROGRAM,
            "LANES": triton.next_power_of_2(head_dim // 2),
            "HAS_NORM": has_norm,
            "IS_E4M3": cache == "u8",
        },
        {"num_warps": 1},
        is_hot=model == "bf16",
    )


def _move_variant(itemsize: int, head_dim: int) -> Variant:
    raw = {1: "u8", 2: "i16", 4: "i32"}[itemsize]
    chunk, lanes = _move_tile(head_dim, itemsize)
    return Variant(
        f"move_slots {raw} {head_dim}",
        _move_slots,
        {
            "data": f"*{raw}",
            "src": "*i32",
            "dst": "*i32",
            "num_blocks": "i32",
            "num_moves": "i32",
        },
        {
            "NUM_KV_HEADS": 8,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "CHUNK": chunk,
            "LANES": lanes,
        },
        {"num_warps": 1},
        is_hot=itemsize < 4,
    )
