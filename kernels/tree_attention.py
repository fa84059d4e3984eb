"""Tree attention over the paged KV cache on a GPU: how its kernels are launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels import attention_kernels
from specdec.kernels.attention_tiles import (
    FIXED_SPLIT,
    AttentionTiles,
    block_of_keys,
    largest_block_m,
)
from specdec.kernels.e4m3 import E4M3_SHIFT
from specdec.kernels.variant import Variant

# Only these keep the sums of a tile of 128 rows in registers.
LARGE_TILE_TARGETS = ("sm_90", "sm_100")
_LOG2_E = 1.4426950408889634
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: AttentionTiles,
    *,
    scale: float,
    window: int | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """Attention of query rows over the paged cache, ancestors only within a draft tree.

    q: [num_rows, num_heads, head_dim], fp32, fp16 or bf16; caches: [num_blocks, num_kv_heads,
    block_size, head_dim] in q's dtype or in float8_e4m3fn with `k_scales`, `v_scales` fp32
    [num_kv_heads], the rows' own keys and values written already. Returns q's shape and dtype; rows
    that belong to no segment are zero. `reference.tree_attention` is the specification; the split
    follows flash-decoding (Dao et al. 2023) and the packing of query heads GQA (Ainslie 2023).

    Example: `tree_attention(q, k, v, make_tiles(segments, shape, ...), scale=dim**-0.5)`.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    shape = tiles.shape
    is_e4m3 = k_cache.dtype == torch.float8_e4m3fn
    if is_e4m3:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        assert k_scales is not None and v_scales is not None
    num_tail = len(tiles.tail_rows)
    is_direct = shape.num_splits == 1 and not num_tail
    num_states = 0 if is_direct else shape.num_splits * num_rows * num_heads
    partial_acc = torch.empty(num_states, head_dim, dtype=torch.float32, device=q.device)
    partial_ml = torch.empty(num_states, 2, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    constants = _constants(
        num_kv_heads, shape.group, head_dim, block_size, is_e4m3=is_e4m3, dtype=q.dtype
    )
    sizes = _sizes(shape.block_m, shape.block_n, shape.words, shape.split_size, window)
    scalars = (
        scale * _LOG2_E * (E4M3_SHIFT if is_e4m3 else 1.0),
        window or 0,
        num_rows,
        tiles.block_tables.stride(0),
    )
    is_amd = torch.version.hip is not None
    options = _options(shape.block_m, head_dim, q.dtype, is_amd=is_amd)
    attention_kernels.attend[(len(tiles.tile_rows), num_kv_heads, shape.num_splits)](
        q, k_cache, v_cache, k_scales, v_scales, out, partial_acc, partial_ml,
        tiles.tile_segments, tiles.tile_rows, tiles.first_rows, tiles.num_rows, tiles.roots,
        tiles.shared_lens, tiles.num_own, tiles.block_tables, tiles.positions, tiles.ancestors,
        *scalars, **constants, **sizes, IS_DIRECT=is_direct, **options,
    )  # fmt: skip
    if is_direct:
        return out
    if num_tail:
        options = _options(shape.block_m, head_dim, q.dtype, is_tail=True, is_amd=is_amd)
        attention_kernels.attend_tail[(num_tail, num_kv_heads)](
            q, k_cache, v_cache, k_scales, partial_acc, partial_ml, tiles.tail_rows,
            tiles.tail_segments, tiles.first_rows, tiles.num_rows, tiles.roots, tiles.shared_lens,
            tiles.block_tables, tiles.positions, tiles.ancestors, *scalars, **constants, **sizes,
            **options,
        )  # fmt: skip
    del constants["BLOCK_SIZE"], constants["DTYPE"]
    attention_kernels.merge[(num_rows, num_kv_heads)](
        partial_acc, partial_ml, v_scales, out, shape.num_splits, num_rows,
        **constants, BLOCK_G=triton.next_power_of_2(shape.group),
        **_merge_options(is_amd=is_amd),
    )  # fmt: skip
    return out


def _constants(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    *,
    is_e4m3: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Compile-time constants that a model fixes."""
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "IS_E4M3": is_e4m3,
        "DTYPE": _DTYPES[dtype],
    }


def _sizes(
    block_m: int, block_n: int, words: int, split_size: int, window: int | None
) -> dict[str, Any]:
    """Compile-time constants that a step fixes."""
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "WORDS": words,
        "SPLIT_SIZE": split_size,
        "HAS_WINDOW": window is not None,
    }


def _options(
    block_m: int, head_dim: int, dtype: torch.dtype, *, is_tail: bool = False, is_amd: bool
) -> dict[str, int]:
    """Launch options: as many warps and registers as keep a large tile's sums in registers."""
    is_large = block_m * triton.next_power_of_2(head_dim) >= 64 * 128
    # The tail has few tiles to load ahead, and its registers are needed to find ancestors.
    num_stages = 1 if is_tail or dtype == torch.float32 else 2
    # Fused in both kernels or in neither: deterministic mode takes up in one what the other began.
    options = {"num_stages": num_stages, "enable_fp_fusion": True}
    if is_amd:
        return {**options, "num_warps": 4}  # a warp has 64 lanes
    return {**options, "num_warps": 8 if is_large else 4, "maxnreg": 255}


def _merge_options(*, is_amd: bool) -> dict[str, int]:
    return {"num_warps": 4} if is_amd else {"num_warps": 4, "maxnreg": 64}


_TABLES = (
    "tile_segments", "tile_rows", "first_rows", "num_rows", "roots", "shared_lens", "num_own",
    "block_tables", "positions", "tail_rows", "tail_segments",
)  # fmt: skip


def variants() -> Iterator[Variant]:
    """The forms to compile ahead of time: decode shapes of common models are hot."""
    for block_m in (16, 64, 128):
        yield from _forms(128, 8, 4, block_m, torch.bfloat16)
    yield from _forms(64, 3, 3, 16, torch.bfloat16)
    yield from _forms(64, 8, 8, 64, torch.bfloat16)
    yield from _forms(128, 8, 4, 64, torch.bfloat16, is_e4m3=True)
    yield from _forms(128, 8, 4, 64, torch.bfloat16, words=4, window=4096)
    for head_dim, num_kv_heads, group in ((128, 8, 4), (64, 3, 3), (256, 8, 1)):
        block_m = largest_block_m(head_dim, 2)
        yield from _forms(
            head_dim, num_kv_heads, group, block_m, torch.bfloat16, split_size=FIXED_SPLIT
        )
    yield from _forms(128, 8, 4, 64, torch.bfloat16, is_e4m3=True, split_size=FIXED_SPLIT)
    yield from _forms(128, 8, 4, 32, torch.bfloat16, words=2)
    for head_dim in (16, 32, 80, 96, 256):
        yield from _forms(head_dim, 8, 1, largest_block_m(head_dim, 2), torch.bfloat16)
    yield from _forms(128, 8, 4, 64, torch.float16)
    for head_dim in (64, 256):
        block_m = largest_block_m(head_dim, 4)
        yield from _forms(
            head_dim, 8, 4, block_m, torch.float32, split_size=FIXED_SPLIT, is_hot=False
        )


def _forms(
    head_dim: int,
    num_kv_heads: int,
    group: int,
    block_m: int,
    dtype: torch.dtype,
    *,
    is_e4m3: bool = False,
    words: int = 1,
    window: int | None = None,
    split_size: int = 0,
    is_hot: bool = True,
) -> Iterator[Variant]:
    """The kernels of one launch shape."""
    kind = _NAMES[dtype]
    tags = [f"{kind} d{head_dim} g{group} m{block_m} w{words}"]
    tags += ["e4m3"] * is_e4m3 + ["window"] * (window is not None) + ["fixed"] * (split_size > 0)
    tag = " ".join(tags)
    cache = "*u8" if is_e4m3 else f"*{kind}"
    types = {
        "q": f"*{kind}",
        "k_cache": cache,
        "v_cache": cache,
        "out": f"*{kind}",
        **dict.fromkeys(("k_scales", "v_scales", "partial_acc", "partial_ml"), "*fp32"),
        **dict.fromkeys(_TABLES, "*i32"),
        "ancestors": "*i64",
        "scale": "fp32",
        **dict.fromkeys(("window", "total_rows", "table_stride", "num_splits"), "i32"),
    }
    constants = _constants(num_kv_heads, group, head_dim, 32, is_e4m3=is_e4m3, dtype=dtype)
    sizes = _sizes(block_m, block_of_keys(head_dim), words, split_size, window)
    is_large = block_m > largest_block_m(head_dim, dtype.itemsize)
    targets = LARGE_TILE_TARGETS if is_large else ()

    def form(name: str, kernel: Any, extra: dict[str, Any]) -> Variant:
        every = {**constants, **sizes, **extra}
        signature = {arg: types[arg] for arg in kernel.arg_names if arg in types}
        used = {arg: every[arg] for arg in kernel.arg_names if arg in every}
        is_tail = name == "attend_tail"

        def options(is_amd: bool) -> dict[str, int]:
            if name == "merge":
                return _merge_options(is_amd=is_amd)
            return _options(block_m, head_dim, dtype, is_tail=is_tail, is_amd=is_amd)

        return Variant(
            f"{name} {tag}",
            kernel,
            signature,
            used,
            options(is_amd=False),
            options(is_amd=True),
            is_hot=is_hot,
            targets=targets,
        )

    kernels = attention_kernels
    yield form("attend direct", kernels.attend, {"IS_DIRECT": True})
    yield form("attend split", kernels.attend, {"IS_DIRECT": False})
    if split_size:
        yield form("attend_tail", kernels.attend_tail, {})
    yield form("merge", kernels.merge, {"BLOCK_G": triton.next_power_of_2(group)})
