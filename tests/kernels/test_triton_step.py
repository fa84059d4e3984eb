"""TritonStep: its ops on a step's tables give what ReferenceStep gives, 8-bit caches too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.kernels.attention_tiles import TileShape
from specdec.kernels.batch import Batch
from specdec.kernels.layer_cache import LayerCache
from specdec.kernels.reference_step import ReferenceStep
from specdec.kernels.segment import Segment
from specdec.kernels.step_ops import HeadShape
from specdec.kernels.step_tables import StepTables, TableSizes
from specdec.kernels.triton_step import TritonStep
from tests.kernels.device import DEVICE, check_error, randn

HEADS = HeadShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.3, eps=0.5)
TILES = TileShape(group=2, block_m=16, block_n=64, num_splits=1, split_size=0, words=1)
BLOCK_SIZE = 16
# A chunk of four rows and a root with two children, each over blocks of its own.
SEGMENTS = (Segment(0, 4, 20, (3, 1)), Segment(4, 3, 9, (2,), (0b1, 0b11, 0b101)))
NUM_ROWS = 8  # one of them padding


def make_batch() -> Batch:
    places = [(s, s.root + row) for s in SEGMENTS for row in range(s.num_rows)]
    return Batch(
        token_ids=(1, 2, 3, 4, 5, 6, 7),
        positions=tuple(position for s in SEGMENTS for position in s.positions),
        slots=tuple(s.block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for s, p in places),
        segments=SEGMENTS,
        logit_rows=(4, 5, 6),
        first_logit=(0, 3),
    )


def make_steps() -> tuple[TritonStep, ReferenceStep]:
    batch = make_batch()
    tables = StepTables(TableSizes(NUM_ROWS, 4, 4, 2, 0, 3, TILES), DEVICE)
    tables.load(batch)
    cos, sin = randn(40, 16, seed=1), randn(40, 16, seed=2)
    return (
        TritonStep(tables, HEADS, cos, sin),
        ReferenceStep(batch, HEADS, cos, sin, block_size=BLOCK_SIZE, num_padding=1),
    )


def make_cache() -> LayerCache:
    shape = (5, HEADS.num_kv_heads, BLOCK_SIZE, HEADS.head_dim)
    return LayerCache(randn(*shape, seed=3), randn(*shape, seed=4))


def bytes_of(cache: LayerCache, k_scales: Tensor, v_scales: Tensor) -> LayerCache:
    """The same keys and values in eight bits."""
    k, v = (
        (numbers / scales[:, None, None]).to(torch.float8_e4m3fn)
        for numbers, scales in ((cache.k, k_scales), (cache.v, v_scales))
    )
    return LayerCache(k, v, k_scales, v_scales)


def numbers_of(cache: LayerCache) -> LayerCache:
    """What an eight-bit cache stands for, in fp32."""
    assert cache.k_scales is not None and cache.v_scales is not None
    return LayerCache(
        cache.k.float() * cache.k_scales[:, None, None],
        cache.v.float() * cache.v_scales[:, None, None],
    )


def test_tables_are_those_of_the_reference() -> None:
    ours, plain = make_steps()
    assert torch.equal(ours.token_ids.long(), plain.token_ids)
    assert torch.equal(ours.logit_rows.long(), plain.logit_rows)


def test_norms_and_silu() -> None:
    ours, plain = make_steps()
    x, delta, weight = randn(3, 32, seed=5), randn(3, 32, seed=6), randn(32, seed=7)
    for more in (None, delta):
        results = [s.add_rms_norm(x, more, weight, 0.5, torch.float32) for s in (ours, plain)]
        for got, want in zip(*results, strict=True):
            check_error(got, want, want)
    check_error(ours.silu_mul(x), plain.silu_mul(x), plain.silu_mul(x))


@pytest.mark.parametrize("has_norms", [True, False])
def test_rope_write(has_norms: bool) -> None:
    qkv = randn(NUM_ROWS, 8 * 16, seed=8)
    q_norm, k_norm = (randn(16, seed=seed) if has_norms else None for seed in (9, 10))
    caches = make_cache(), make_cache()
    ours, plain = make_steps()
    got = ours.rope_write(qkv, q_norm, k_norm, caches[0])
    want = plain.rope_write(qkv, q_norm, k_norm, caches[1])
    check_error(got, want, want)
    for name in ("k", "v"):
        written, expected = (getattr(cache, name) for cache in caches)
        check_error(written, expected, expected)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("is_e4m3", [False, True], ids=["same", "e4m3"])
def test_attention(window: int | None, is_e4m3: bool) -> None:
    ours, plain = make_steps()
    cache = stored = make_cache()
    if is_e4m3:
        scales = torch.tensor([0.5, 2.0], device=DEVICE), torch.tensor([4.0, 0.25], device=DEVICE)
        stored = bytes_of(cache, *scales)
        cache = numbers_of(stored)
    q = randn(NUM_ROWS, 4, 16, seed=11)
    want = plain.tree_attention(q, cache, window)
    check_error(ours.tree_attention(q, stored, window), want, want)


def test_eight_bits_are_written_by_their_own_scales() -> None:
    scales = torch.tensor([0.5, 2.0], device=DEVICE), torch.tensor([4.0, 0.25], device=DEVICE)
    qkv = randn(NUM_ROWS, 8 * 16, seed=8)
    ours, plain = make_steps()
    cache, whole = bytes_of(make_cache(), *scales), make_cache()
    ours.rope_write(qkv, None, None, cache)
    plain.rope_write(qkv, None, None, whole)
    want = bytes_of(whole, *scales)
    for name in ("k", "v"):
        got, exact = (getattr(c, name).float() for c in (cache, want))
        # Rotation rounds in another order: a number between two codes may fall to either.
        assert ((got - exact).abs() <= exact.abs() / 8 + 2**-9).all()
