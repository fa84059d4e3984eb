"""Keys and values normed, rotated and written to slots, and moved between slots."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels import kv_slots, reference
from specdec.kv_cache import KVCache, slot_at
from tests.kernels.device import DEVICE, DTYPES, check_error, randn
from tests.kernels.guard import guarded_results, surrounded

E4M3 = torch.float8_e4m3fn
EPS = 1e-5
HUGE = 2**32 + 2**16  # numbers: here a 32-bit address would meet other memory of the same tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --- rope_write ---

NUM_ROWS = 5
ALL = list(range(NUM_ROWS))
PLAIN_CACHES = [(dtype, dtype) for dtype in DTYPES] + [(torch.float16, torch.float32)]


@dataclass
class Step:
    """Rows of one step, with NaN in whatever belongs to nobody: tables, cache and memory around."""

    head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    has_norm: bool = False
    num_heads: int = 6
    num_kv_heads: int = 2
    block_size: int = 16
    num_blocks: int = 4

    def __post_init__(self) -> None:
        num_all = self.num_heads + 2 * self.num_kv_heads
        qkv = 3 * randn(NUM_ROWS, num_all * self.head_dim, seed=self.head_dim)
        qkv[0] *= 1e-3  # where eps matters
        self.qkv = qkv.to(self.dtype)
        rng = random.Random(self.head_dim)
        positions = rng.sample(range(300), NUM_ROWS)
        slots = rng.sample(range(self.num_blocks * self.block_size), NUM_ROWS)
        slots[1] = -1
        self.positions = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
        self.slots = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        # Tables of any numbers, other ones in either half; NaN where no row looks.
        self.tables = [
            torch.full((300, self.head_dim), float("nan"), device=DEVICE) for _ in range(2)
        ]
        for seed, table in enumerate(self.tables):
            table[positions] = randn(NUM_ROWS, self.head_dim, seed=seed).clamp(-1, 1)
        self.norms = [surrounded(1 + randn(self.head_dim, seed=seed) / 4) for seed in (2, 3)]
        self.scales = [randn(self.num_kv_heads, seed=s).abs() / 200 + 0.01 for s in (4, 5)]
        self.caches = self.new_caches()

    def new_caches(self) -> Tensor:
        shape = (2, self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        return torch.full(shape, float("nan"), device=DEVICE).to(self.cache_dtype)

    def write(self, rows: list[int], k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """The kernel on these rows of the step, in this order."""
        q_norm, k_norm = self.norms if self.has_norm else (None, None)
        k_scale, v_scale = self.scales if self.cache_dtype == E4M3 else (None, None)
        cos, sin = self.tables
        return kv_slots.rope_write(
            surrounded(self.qkv[rows]), cos, sin, self.positions[rows], self.slots[rows],
            k_cache, v_cache,
            num_heads=self.num_heads, q_norm=q_norm, k_norm=k_norm, eps=EPS,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    def plain(self, compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [rows, heads, head_dim] of the reference, in `compute`; k and v unscaled."""
        heads = self.qkv.to(compute).view(NUM_ROWS, -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.has_norm:
            q = reference.rms_norm(q, self.norms[0].to(compute), EPS)
            k = reference.rms_norm(k, self.norms[1].to(compute), EPS)
        cos, sin = (table[self.positions.long()].unsqueeze(1) for table in self.tables)
        q_k = reference.rope(torch.cat((q, k), dim=1), cos.to(compute), sin.to(compute))
        return q_k[:, : self.num_heads], q_k[:, self.num_heads :], v

    def cached(self) -> Tensor:
        """What the written rows' slots hold: [2, rows, num_kv_heads, head_dim]."""
        rows = reference.slot_rows(
            self.slots[self.is_written].long(), self.num_kv_heads, self.block_size
        )
        return self.caches.view(2, -1, self.head_dim)[:, rows]

    @property
    def is_written(self) -> Tensor:
        return self.slots >= 0


def check_step(step: Step) -> None:
    with guarded_results(kv_slots):
        q = step.write(ALL, *step.caches)
    assert q.dtype == step.dtype
    exact, plain = step.plain(torch.float64), step.plain(torch.float32)
    check_error(q, plain[0].to(step.dtype), exact[0])
    check_error(q[0], plain[0][0].to(step.dtype), exact[0][0])  # by its own, small size

    kept = step.is_written
    k, v = step.cached()
    k_plain, v_plain = (x[kept] for x in plain[1:])
    k_exact = exact[1][kept]
    if step.cache_dtype == E4M3:
        k_scale, v_scale = (scale[:, None] for scale in step.scales)
        k_exact, v_plain = k_exact / k_scale, (v_plain / v_scale).clamp(-448, 448)
        assert 0 < (v_plain.abs() == 448).sum() < v_plain.numel() / 2
        # Rounded to one of the two neighbours only where fp32's error reaches the middle.
        error = 1e-5 * k_exact.abs().max()
        lowest, highest = ((k_exact + e).clamp(-448, 448).to(E4M3) for e in (-error, error))
        assert (lowest.double() <= k.double()).all()
        assert (k.double() <= highest.double()).all()
    else:
        check_error(k, k_plain.to(step.cache_dtype), k_exact)
    assert same_bits(v, v_plain.to(step.cache_dtype))

    # All other slots still hold their NaN.
    want = step.new_caches()
    rows = reference.slot_rows(step.slots[kept].long(), step.num_kv_heads, step.block_size)
    want.view(2, -1, step.head_dim)[:, rows] = torch.stack((k, v))
    assert same_bits(step.caches, want)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("dtype", "cache_dtype"), PLAIN_CACHES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_rope_write(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, has_norm: bool
) -> None:
    check_step(Step(head_dim, dtype, cache_dtype, has_norm))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "has_norm"), [(64, False), (80, True)])
def test_rope_write_e4m3(head_dim: int, has_norm: bool, dtype: torch.dtype) -> None:
    check_step(Step(head_dim, dtype, E4M3, has_norm))


def test_e4m3_is_the_rounded_quotient() -> None:
    """Quotients close to halfway cases: no product with 1 / scale would do, no fp16 between."""
    step = Step(64, torch.float32, E4M3)
    for table, value in zip(step.tables, (1.0, 0.0), strict=True):
        table[step.positions.long()] = value  # no rotation, so k is known exactly
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    halfway = ((numbers[1:] + numbers[:-1]) / 2).to(DEVICE)
    k, v = step.qkv.view(NUM_ROWS, -1, 64).split([6, 2, 2], dim=1)[1:]
    for x, scale, seed in zip((k, v), step.scales, (6, 7), strict=True):
        which = randn(*x.shape, seed=seed).mul(1000).long() % len(halfway)
        x.copy_(halfway[which] * scale[:, None] * (1 + 1e-7 * randn(*x.shape, seed=seed + 2)))
    step.write(ALL, *step.caches)
    for got, x, scale in zip(step.cached(), (k, v), step.scales, strict=True):
        assert same_bits(got, (x[step.is_written] / scale[:, None]).to(E4M3))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "block_size"), [(1, 1, 16), (9, 3, 32), (7, 1, 48), (4, 4, 16)]
)
def test_rope_write_head_counts(num_heads: int, num_kv_heads: int, block_size: int) -> None:
    """Programs take several heads: groups of q, k and v need not end where a program does."""
    step = Step(
        16, torch.float16, torch.float16, True, num_heads, num_kv_heads, block_size=block_size
    )
    check_step(step)


@pytest.mark.parametrize("cache_dtype", [torch.float16, E4M3])
def test_a_row_is_its_own_business(cache_dtype: torch.dtype) -> None:
    """The same bits alone and in any order, beside NaN too."""
    step = Step(80, torch.float16, cache_dtype, has_norm=True)
    q = step.write(ALL, *step.caches)
    caches = step.new_caches()
    for row in (3, 0, 4, 2, 1):
        assert torch.equal(step.write([row], *caches)[0], q[row])
    assert same_bits(caches, step.caches)
    caches = step.new_caches()
    assert torch.equal(step.write([4, 2, 0, 1, 3], *caches), q[[4, 2, 0, 1, 3]])
    assert same_bits(caches, step.caches)
    step.qkv[1] = float("nan")  # the row without a slot
    step.qkv[2, 5 * 80 : 6 * 80] = float("nan")  # a head's own business, too
    beside_nan = step.write(ALL, *caches)
    assert beside_nan.isnan().sum() == 7 * 80
    assert torch.equal(beside_nan[[0, 3, 4]], q[[0, 3, 4]])
    assert torch.equal(beside_nan[2, :5], q[2, :5])
    assert same_bits(caches, step.caches)


def test_equal_slots_hold_one_of_their_rows() -> None:
    """Padding rows share a slot of a block that nobody reads."""
    step = Step(64, torch.float32, torch.float32)
    want = step.plain(torch.float32)[2]
    step.slots[:] = 17
    step.write(ALL, *step.caches)
    v = step.cached()[1][0]
    assert any(torch.equal(v, row) for row in want)


def test_rope_write_to_a_huge_cache() -> None:
    """Keys and values overlap, for only one slot of either is touched: memory is not paged in."""
    step = Step(64, torch.float32, E4M3)
    block = step.num_kv_heads * step.block_size * step.head_dim
    num_blocks = HUGE // block
    memory = torch.empty((num_blocks + 1) * block, dtype=torch.uint8, device=DEVICE).view(E4M3)
    step.write([0], *step.caches)
    want = step.cached()[:, 0]
    shape = (num_blocks, *step.caches.shape[2:])
    caches = [memory[start:][: num_blocks * block].view(shape) for start in (0, block)]
    step.slots[0] = (num_blocks - 1) * step.block_size + 5
    step.write([0], *caches)
    for cache, row in zip(caches, want, strict=True):
        assert same_bits(cache[-1, :, 5].contiguous(), row.contiguous())


# --- move_slots ---


RAW = {torch.float32: torch.int32, torch.float16: torch.int16, E4M3: torch.uint8}


def accepted_moves(
    table: list[int], root: int, path: list[int], block_size: int
) -> tuple[list[int], list[int]]:
    """Slots of a request's accepted nodes, and of the positions that these nodes belong to."""
    src = [slot_at(table, root + node, block_size) for node in path]
    dst = [slot_at(table, root + depth, block_size) for depth in range(1, len(path) + 1)]
    return src, dst


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(RAW)),
    num_kv_heads=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([16, 80, 96]),
    block_size=st.sampled_from([16, 48]),
    num_nodes=st.lists(st.sampled_from([2, 3, 8, 40, 256]), min_size=1, max_size=4),
    share=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 999),
)
def test_move_slots(
    dtype: torch.dtype,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_nodes: list[int],
    share: float,
    seed: int,
) -> None:
    """As KVCache.move does it, which reads everything first; any other bit stays as it was."""
    rng = random.Random(seed)
    roots = [rng.randrange(block_size) for _ in num_nodes]
    needed = [(r + n) // block_size + 1 for r, n in zip(roots, num_nodes, strict=True)]
    free = rng.sample(range(sum(needed) + 2), sum(needed))
    src: list[int] = []
    dst: list[int] = []
    for root, nodes, num_blocks in zip(roots, num_nodes, needed, strict=True):
        table, free = free[:num_blocks], free[num_blocks:]
        path = sorted(rng.sample(range(1, nodes), max(1, round(share * (nodes - 1)))))
        moves = accepted_moves(table, root, path, block_size)
        src, dst = src + moves[0], dst + moves[1]

    want = KVCache(
        num_layers=2,
        num_blocks=sum(needed) + 2,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=RAW[dtype],
        device=DEVICE,
    )
    low, high = torch.iinfo(RAW[dtype]).min, torch.iinfo(RAW[dtype]).max
    want.data.random_(low, high, generator=torch.Generator(DEVICE).manual_seed(seed))
    data = surrounded(want.data, 7)
    kv_slots.move_slots(data.view(dtype), as_slots(src), as_slots(dst))
    want.move(src, dst)
    assert torch.equal(data, want.data)


def as_slots(slots: list[int]) -> Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=DEVICE)


def test_a_destination_may_be_the_source_before_it() -> None:
    data = torch.arange(2 * 16, device=DEVICE).float().view(1, 2, 1, 1, 16, 1)
    kv_slots.move_slots(data, as_slots([1, 3]), as_slots([0, 1]))
    assert data[0, 0, 0, 0, :5, 0].tolist() == [1, 3, 2, 3, 4]
    kv_slots.move_slots(data, as_slots([]), as_slots([]))  # a step that accepts chains only


def test_move_slots_in_a_huge_cache() -> None:
    shape = (3, 2, HUGE // (6 * 2048) + 1, 2, 16, 64)
    data = torch.empty(shape, dtype=torch.uint8, device=DEVICE)  # never paged in, but for ...
    block = data[:, :, -1]
    block.copy_(torch.randint(256, block.shape, dtype=torch.uint8))
    want = block.clone()
    want[..., 2, :] = want[..., 9, :]
    first = (shape[2] - 1) * 16
    kv_slots.move_slots(data.view(E4M3), as_slots([first + 9]), as_slots([first + 2]))
    assert torch.equal(block, want)


def test_variants_name_every_argument() -> None:
    variants = list(kv_slots.variants())
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        names = [*variant.signature, *variant.constants]
        assert sorted(names) == sorted(variant.kernel.arg_names)
