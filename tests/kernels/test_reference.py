"""The reference kernels against dense and literal oracles."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels import reference
from specdec.kernels.attention_group import ROW_TILE, attention_groups
from specdec.kv_cache import KVCache
from specdec.model_runner import ModelRunner
from specdec.params import SamplingParams
from specdec.plan import DecodeStep, PrefillChunk, StepPlan
from specdec.request import Request
from specdec.tree import ROOT_SOURCE, DraftTree

EPS = torch.finfo(torch.float32).eps


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(got: Tensor, plain: Tensor, exact: Tensor, largest: Tensor | None = None) -> None:
    """Error at most twice that of a plain fp32 implementation, both against fp64.

    Plus two ulps of the largest summand, for a plain result of few rows may be right by luck.
    """
    unit = EPS * (exact.abs().max() if largest is None else largest)
    limit = 2 * (plain.double() - exact).abs().max() + 2 * unit
    assert got.shape == exact.shape
    assert (got.double() - exact).abs().max() <= limit


# --- attention ---


@dataclass(frozen=True)
class Job:
    """A request's context, the known tokens still to compute, and its draft tree's parents."""

    context: int
    num_chunk: int
    parents: tuple[int, ...]

    @property
    def root(self) -> int:
        return self.context + self.num_chunk

    @property
    def tree(self) -> DraftTree:
        n = len(self.parents)
        return DraftTree((0,) * n, self.parents, (0.0,) * n, ((ROOT_SOURCE,),) * n)


@st.composite
def parents(draw: st.DrawFn) -> tuple[int, ...]:
    n = draw(st.sampled_from([1, 1, 2, 5, 9, 33, 70]))
    reach = draw(st.sampled_from([1, 2, 5, 70]))  # 1: a chain; 70: any shape
    rng = random.Random(draw(st.integers(0, 999)))
    return (-1, *(rng.randrange(max(0, node - reach), node) for node in range(1, n)))


jobs = st.builds(
    Job,
    context=st.integers(0, 200) | st.integers(250, 600),  # either side of TILES_PER_SUM tiles
    num_chunk=st.sampled_from([0, 0, 1, 7, 40]),
    parents=parents(),
)


@dataclass(frozen=True)
class Shape:
    block_size: int
    num_kv_heads: int
    ratio: int
    head_dim: int


shapes = st.builds(
    Shape,
    block_size=st.sampled_from([16, 32, 48]),
    num_kv_heads=st.sampled_from([1, 2]),
    ratio=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([16, 64, 80]),
)


def is_ancestor(tree: DraftTree) -> Tensor:
    """[num_nodes, num_nodes], bit by bit from the masks."""
    nodes = range(tree.num_nodes)
    return torch.tensor([[mask >> j & 1 == 1 for j in nodes] for mask in tree.ancestors])


def visible(job: Job, window: int | None) -> Tensor:
    """[chunk + nodes, root + nodes]: which places (position, or root + node) a row attends to."""
    tree, root = job.tree, job.root
    committed = torch.arange(root)
    chunk = committed[job.context :, None]
    is_causal = committed <= chunk
    reach = torch.cat((committed[job.context :], root + torch.tensor(tree.depths)))
    places = torch.cat((committed, root + torch.tensor(tree.depths)))  # as positions
    mask = torch.zeros(len(reach), len(places), dtype=torch.bool)
    mask[: job.num_chunk, :root] = is_causal
    mask[job.num_chunk :, :root] = True
    mask[job.num_chunk :, root:] = is_ancestor(tree)
    return mask if window is None else mask & (places > reach[:, None] - window)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Full softmax. q: [rows, heads, dim]; k, v: [keys, kv heads, dim]; mask: [rows, keys]."""
    ratio = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    scores = torch.einsum("rhd,khd->hrk", q, k) * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, v)


@settings(max_examples=100, deadline=None)
@given(
    shape=shapes,
    mix=st.lists(jobs, min_size=1, max_size=3),
    window=st.sampled_from([None, None, 1, 5, 16, 50]),
    is_scattered=st.booleans(),
    num_padding=st.sampled_from([0, 3]),
    seed=st.integers(0, 999),
)
def test_tree_attention_is_dense_attention(
    shape: Shape,
    mix: list[Job],
    window: int | None,
    is_scattered: bool,
    num_padding: int,
    seed: int,
) -> None:
    size = shape.block_size
    needed = [-(-(job.root + len(job.parents)) // size) for job in mix]
    cache = KVCache(
        num_layers=1,
        num_blocks=sum(needed),
        num_kv_heads=shape.num_kv_heads,
        block_size=size,
        head_dim=shape.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.data.copy_(randn(*cache.data.shape, seed=seed))  # what no row may see is not zero
    free = list(range(sum(needed)))
    if is_scattered:
        random.Random(seed).shuffle(free)
    chunks, steps = [], []
    for index, (job, num_blocks) in enumerate(zip(mix, needed, strict=True)):
        request = Request(str(index), (0,) * (job.root + 1), SamplingParams(seed=0))
        request.block_ids, free = free[:num_blocks], free[num_blocks:]
        if job.num_chunk:
            chunks.append(PrefillChunk(request, job.context, job.root))
        steps.append(DecodeStep(request, len(job.parents) - 1))
    model: Any = None
    runner = ModelRunner(model, cache)
    batch = runner.pack(StepPlan(tuple(chunks), tuple(steps)), [job.tree for job in mix])
    heads = shape.num_kv_heads * shape.ratio
    q = randn(batch.num_rows + num_padding, heads, shape.head_dim, seed=seed + 1)
    k_cache, v_cache = cache.layer(0).k, cache.layer(0).v
    scale = shape.head_dim**-0.5
    got = reference.tree_attention(
        q, k_cache, v_cache, attention_groups(batch.segments, size, window), scale
    )

    first_chunk, first_node = 0, sum(chunk.end - chunk.start for chunk in chunks)
    for job, step in zip(mix, steps, strict=True):
        nodes = range(first_node, first_node + len(job.parents))
        rows = [*range(first_chunk, first_chunk + job.num_chunk), *nodes]
        first_chunk, first_node = first_chunk + job.num_chunk, nodes.stop
        table = torch.tensor(step.request.block_ids)
        places = torch.arange(job.root + len(job.parents))
        k, v = (c[table[places // size], :, places % size] for c in (k_cache, v_cache))
        mask = visible(job, window)
        exact = dense(q[rows].double(), k.double(), v.double(), mask, scale)
        check(got[rows], dense(q[rows], k, v, mask, scale), exact, largest=v.abs().max())
    assert not got[batch.num_rows :].any()


def test_groups_are_small_enough() -> None:
    """The row tile bounds what one group reads and packs."""
    cache = cast(KVCache, SimpleNamespace(block_size=16))
    model: Any = None
    request = Request("r", (0,) * 101, SamplingParams(seed=0))
    request.block_ids = list(range(20))
    plan = StepPlan((PrefillChunk(request, 0, 100),), (DecodeStep(request, 69),))
    tree = Job(0, 100, (-1, *(node // 2 for node in range(69)))).tree
    batch = ModelRunner(model, cache).pack(plan, [tree])
    groups = attention_groups(batch.segments, 16, None)
    assert max(group.num_rows for group in groups) == ROW_TILE
    covered = [row for group in groups for row in range(group.start, group.end)]
    assert covered == list(range(170))


# --- the other ops ---


@given(
    num_rows=st.sampled_from([1, 2, 33]),
    inner=st.sampled_from([(), (3,)]),
    dim=st.sampled_from([16, 80, 576]),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_rms_norm(num_rows: int, inner: tuple[int, ...], dim: int, seed: int) -> None:
    x = randn(num_rows, *inner, dim, seed=seed)
    x[0] *= 1e-4  # where eps matters
    weight = randn(dim, seed=seed + 1)

    def literal(x: Tensor) -> Tensor:
        return x * weight / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    check(reference.rms_norm(x, weight, 1e-5), literal(x), literal(x.double()))


@given(
    num_rows=st.sampled_from([1, 2, 33]),
    dim=st.sampled_from([16, 80]),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_rope_turns_pairs_in_the_plane(num_rows: int, dim: int, seed: int) -> None:
    """Element i and i + dim / 2 are a point, turned by the row's angle."""
    x = randn(num_rows, 3, dim, seed=seed)
    angles = 100 * randn(num_rows, 1, dim // 2, seed=seed + 1)
    cos, sin = angles.cos(), angles.sin()

    def literal(x: Tensor) -> Tensor:
        points = torch.complex(x[..., : dim // 2], x[..., dim // 2 :])
        turned = points * torch.complex(cos.to(x.dtype), sin.to(x.dtype))
        return torch.cat((turned.real, turned.imag), -1)

    got = reference.rope(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    check(got, literal(x), literal(x.double()))


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "dim"), [(1, 48), (5, 7), (97, 1531), (33, 1536), (2, 40000)])
def test_silu_mul(num_rows: int, dim: int, dtype: torch.dtype) -> None:
    """Torch shares large tensors out to threads, whose borders fell within rows.

    The elements at such a border went through other instructions, so a row's bits depended on the
    batch: hence the slabs, whose seams must not show either.
    """
    gate_up = (4 * randn(num_rows, 2 * dim, seed=dim)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    exact = gate / (1 + (-gate).exp()) * up
    plain = torch.nn.functional.silu(gate_up[:, :dim]) * gate_up[:, dim:]
    got = reference.silu_mul(gate_up)
    assert got.dtype == dtype
    check(got, plain, exact)
    for row in range(num_rows):
        assert torch.equal(reference.silu_mul(gate_up[row : row + 1])[0], got[row])


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.sampled_from([16, 48])),
    data=st.data(),
)
@settings(deadline=None)
def test_slots_and_writes(shape: tuple[int, int, int], data: st.DataObject) -> None:
    """slot = block * block_size + offset, and nothing but the named slots changes."""
    num_blocks, num_kv_heads, size = shape
    every = st.integers(0, num_blocks * size - 1)
    slots = torch.tensor(data.draw(st.lists(every, min_size=1, max_size=20, unique=True)))
    rows = reference.slot_rows(slots, num_kv_heads, size)
    caches = [randn(num_blocks, num_kv_heads, size, 8, seed=i) for i in range(2)]
    new = [randn(len(slots), num_kv_heads, 8, seed=i) for i in (2, 3)]
    want = [cache.clone() for cache in caches]
    for index, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, size)
        for head in range(num_kv_heads):
            place = (block * num_kv_heads + head) * size + offset
            assert rows[index, head] == place
            for cache, values in zip(want, new, strict=True):
                cache[block, head, offset] = values[index, head]
    reference.write_kv(caches[0], caches[1], rows.flatten(), new[0], new[1])
    assert all(map(torch.equal, caches, want))
    square = slots[: len(slots) // 2 * 2].view(2, -1)
    flat = rows[: square.numel()]
    assert torch.equal(reference.slot_rows(square, num_kv_heads, size).flatten(0, 1), flat)
