"""KVCache: moves over all layers, and committed keys and values equal a fresh prefill's."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.commit import Committer, VerifiedStep
from specdec.engine import Engine
from specdec.kv_cache import KVCache
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.target import PagedCache
from specdec.tree import DraftTree
from specdec.verification import Verdict
from tests.cache_contents import by_slot, contents, poison
from tests.kernels.device import DEVICE
from tests.toy import CONFIG, TruthDrafter, run_all, toy_engine, toy_model
from tests.toy_device import device_path

NUM_BLOCKS, BLOCK_SIZE, DIM = 3, 16, CONFIG["head_dim"]
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE

on_both_backends = pytest.mark.usefixtures("backend")


def filled_cache() -> PagedCache:
    """The toy's, of the default backend, every number another."""
    cache = toy_model().model.make_kv_cache("fp32", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    data = contents(cache)
    data.copy_(torch.arange(data.numel()).view(data.shape))
    return cache


@on_both_backends
def test_move_reads_everything_before_it_writes() -> None:
    slots = st.permutations(range(NUM_SLOTS))

    @given(slots, slots, st.integers(1, NUM_SLOTS))
    def check(src: list[int], dst: list[int], n: int) -> None:
        cache = filled_cache()
        before = by_slot(cache, DIM)
        cache.move(src[:n], dst[:n])
        expected = before.clone()
        for source, target in zip(src[:n], dst[:n], strict=True):
            expected[target] = before[source]
        assert torch.equal(by_slot(cache, DIM), expected)

    check()


@on_both_backends
@pytest.mark.parametrize(
    ("src", "dst"), [([17, 19], [16, 17]), ([16, 17], [17, 19]), ([1, 35], [35, 1])]
)
def test_overlapping_moves(src: list[int], dst: list[int]) -> None:
    cache = filled_cache()
    before = by_slot(cache, DIM)
    cache.move(src, dst)
    assert torch.equal(by_slot(cache, DIM)[dst], before[src])


@on_both_backends
def test_scrub_zeroes_only_the_named_blocks() -> None:
    cache = filled_cache()
    poison(cache, [1])
    kept = by_slot(cache, DIM)
    cache.scrub([1])
    after = by_slot(cache, DIM)
    scrubbed = slice(BLOCK_SIZE, 2 * BLOCK_SIZE)
    assert kept[scrubbed].isnan().all() and (after[scrubbed] == 0).all()
    others = [slot for slot in range(NUM_SLOTS) if slot // BLOCK_SIZE != 1]
    assert torch.equal(after[others], kept[others])
    cache.scrub([])
    assert torch.equal(by_slot(cache, DIM), after)


# --- PyTorch's, which a GPU has too: 8-bit floats, kernels, layers ---


def torch_cache(dtype: torch.dtype) -> KVCache:
    return KVCache(
        num_layers=2,
        num_blocks=NUM_BLOCKS,
        num_kv_heads=2,
        block_size=BLOCK_SIZE,
        head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def filled_torch_cache() -> KVCache:
    cache = torch_cache(torch.float32)
    cache.data.copy_(torch.arange(cache.data.numel()).view(cache.data.shape))
    return cache


def test_a_layer_has_its_own_keys_and_values() -> None:
    cache = filled_torch_cache()
    slots, layer = by_slot(cache, DIM), cache.layer(1)
    block, offset = divmod(37, BLOCK_SIZE)
    assert torch.equal(layer.k[block, :, offset], slots[37, 1, 0])
    assert torch.equal(layer.v[block, :, offset], slots[37, 1, 1])


def test_a_device_moves_by_its_own_kernel() -> None:
    cache = filled_torch_cache()
    cache.data = cache.data.to(DEVICE)
    before = by_slot(cache, DIM)
    with device_path():
        cache.move([7, 9], [6, 7])
    assert torch.equal(by_slot(cache, DIM)[[6, 7]], before[[7, 9]])
    others = [slot for slot in range(NUM_SLOTS) if slot not in (6, 7)]
    assert torch.equal(by_slot(cache, DIM)[others], before[others])


def test_eight_bits_come_with_scales_and_are_scrubbed() -> None:
    cache = torch_cache(torch.float8_e4m3fn)
    layer = cache.layer(1)
    assert layer.k.dtype == layer.v.dtype == torch.float8_e4m3fn
    for scales in (layer.k_scales, layer.v_scales):
        assert scales is not None and scales.tolist() == [1.0, 1.0]
    cache.data.view(torch.uint8)[:] = 0x7F  # NaN
    cache.scrub([2])
    assert (cache.data.float()[:, :, 2] == 0).all()
    assert cache.data.float()[:, :, :2].isnan().all()


def test_bytes_per_block() -> None:
    data = torch_cache(torch.float32).data
    assert KVCache.bytes_per_block(2, 2, BLOCK_SIZE, DIM, torch.float32) * NUM_BLOCKS == data.nbytes


# --- what a commit leaves in it ---


def test_paths_in_place_are_not_moved() -> None:
    """Chains cost no launch; of a branching path only the nodes that lie elsewhere move."""
    engine = toy_engine()
    request = Request("r", (1, 2, 3), SamplingParams())
    request.block_ids = [1]
    kv_cache = Mock()
    committer = Committer(engine.scheduler, kv_cache, ())
    tree = DraftTree.from_paths(3, [[4, 5], [6]], source="x", node_budget=9)

    def keep(*paths: tuple[int, ...]) -> None:
        verdicts = [Verdict(path, (0,) * (len(path) + 1), ()) for path in paths]
        committer._keep_paths([VerifiedStep(DecodeStep(request, 9), tree, v, ()) for v in verdicts])

    keep((1, 2), ())
    assert not kv_cache.move.called
    size = engine.pool.block_size
    keep((1, 2), (1, 3))
    kv_cache.move.assert_called_once_with([size + 2 + 3], [size + 2 + 2])


def committed(engine: Engine, request: Request, num_tokens: int) -> Tensor:
    """Keys and values of the first tokens, all layers: [tokens, layers, 2, heads, head_dim]."""
    size = engine.pool.block_size
    rows = [request.block_ids[p // size] * size + p % size for p in range(num_tokens)]
    return by_slot(engine.runner.kv_cache, DIM)[rows]


def prefilled(token_ids: list[int], num_tokens: int) -> Tensor:
    """Keys and values from a fresh engine that is given all tokens as its prompt."""
    engine = toy_engine(prefix_cache=False)
    request = Request("fresh", tuple(token_ids), SamplingParams(max_tokens=2, ignore_eos=True))
    engine.add(request)
    engine.step()
    return committed(engine, request, num_tokens)


@on_both_backends
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 4}])
@pytest.mark.parametrize("drafter_seed", range(4))
def test_committed_equals_a_fresh_prefill(params: dict[str, float], drafter_seed: int) -> None:
    """Accepted nodes are computed off their place and moved; not one bit may tell."""
    settings = SamplingParams(max_tokens=40, ignore_eos=True, **params)  # type: ignore[arg-type]  # mixed keywords
    prompt = (3, 1, 4, 1, 5)
    reference = Request("r", prompt, settings)
    run_all(toy_engine(), [reference])
    drafter = TruthDrafter({"r": reference.output_ids}, drafter_seed, hit_rate=0.8)
    engine = toy_engine(drafter=drafter, node_budget=30, token_budget=48)
    request = Request("r", prompt, settings)
    neighbour = Request("n", (7, 2) * 20, SamplingParams(max_tokens=100, ignore_eos=True))
    engine.add(neighbour)
    engine.add(request)
    num_checked = 0
    while not request.is_finished:
        engine.step()
        for r in (request, neighbour):
            if r.is_finished or r.num_computed == 0:
                continue
            fresh = prefilled(r.token_ids, r.num_computed)
            assert torch.equal(committed(engine, r, r.num_computed), fresh)
            num_checked += 1
    assert request.output_ids == reference.output_ids
    assert request.stats.num_accepted > 10 and num_checked > 10
