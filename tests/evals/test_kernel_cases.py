"""Kernel cases: what they count, that kernels pass their gate, and that wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from specdec.evals.kernel import bench as kernel_bench
from specdec.evals.kernel.attention_cases import TreeAttention, random_parents
from specdec.evals.kernel.case import (
    Accuracy,
    Dims,
    Expected,
    KernelCase,
    Place,
    Prepared,
    accuracy,
    poisoned_results,
)
from specdec.evals.kernel.cases import cpu_cases, gpu_cases
from specdec.evals.kernel.row_cases import RmsNorm, RopeWrite, SiluMul
from specdec.evals.kernel.step_cases import Choice, MoveSlots, Walk
from specdec.evals.kernel.timer import Ceilings, HostTimer
from specdec.kernels import gumbel_argmax, kv_slots, norm_rope, tree_attention, tree_walk
from specdec.kernels.tree_walk import TreeWalk
from tests.kernels.device import DEVICE

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TINY = Dims(48, 40, 4, 2, 16, 300, 2, 16)
KERNELS = Place(DEVICE, uses_kernels=True)
REFERENCES = Place(torch.device("cpu"), uses_kernels=False)
NAN = float("nan")
TIMER = HostTimer(cache_bytes=1024, most_seconds=0.0)
CEILINGS = Ceilings(1e9, 1e12)

TINY_CASES: list[KernelCase] = [
    TreeAttention(40, 1, 1, TINY, FP32),
    TreeAttention(40, 5, 2, TINY, FP16),
    TreeAttention(70, 3, 1, TINY, FP32, is_deterministic=True),
    TreeAttention(40, 5, 1, TINY, FP16, is_e4m3=True),
    RmsNorm(2, TINY.hidden, FP16),
    RmsNorm(2, TINY.hidden, FP16, has_delta=True),
    SiluMul(3, TINY.inner, FP16),
    SiluMul(3, TINY.inner, FP32),
    RopeWrite(3, TINY, FP16),
    Choice(2, "greedy", TINY.vocab_size, FP16),
    Choice(2, "temperature", TINY.vocab_size, FP16),
    Choice(2, "top-p", TINY.vocab_size, FP16),
    Walk(2, 9),
    MoveSlots(10, TINY, FP16),
]


def name(case: KernelCase) -> str:
    return f"{case.op} {case.label}"


# --- counts ---


def test_attention_reads_keys_once_per_request() -> None:
    """Two requests of 100 positions, whose root is one more key; q and out have 32 heads."""
    case = TreeAttention(100, 1, 2, Dims(), BF16)
    key_and_value = 2 * 8 * 128 * 2
    q_and_out = 2 * 32 * 128 * 2
    assert case.num_bytes == 2 * (101 * key_and_value + q_and_out)
    assert case.num_flops == 2 * 101 * 32 * (2 * 128 + 2 * 128)


def test_attention_counts_ancestors_only() -> None:
    nodes, context = 16, 256
    case = TreeAttention(context, nodes, 2, Dims(), BF16)
    pairs = 0
    for request in range(2):
        parents = random_parents(nodes, request)
        for node in range(nodes):
            pairs += context
            while node >= 0:
                node, pairs = parents[node], pairs + 1
    assert case.num_flops == pairs * 32 * 4 * 128
    assert case.num_bytes == 2 * (272 * 4096 + 16 * 16384)
    fp8 = TreeAttention(context, nodes, 2, Dims(), BF16, is_e4m3=True)
    assert fp8.num_bytes == 2 * (272 * 2048 + 16 * 16384)


@pytest.mark.parametrize(
    ("case", "num_bytes", "num_flops"),
    [
        (RmsNorm(16, 4096, BF16), 16 * 4096 * (4 + 2) + 4096 * 4, 16 * 4096 * 4),
        (RmsNorm(16, 4096, BF16, True), 16 * 4096 * (4 + 2 + 4 + 2) + 16384, 16 * 4096 * 5),
        (SiluMul(1, 14336, BF16), 28672 * 2 + 14336 * 2, 14336 * 5),
        (RopeWrite(2, Dims(), BF16), 2 * (6144 * 2 * 2 + 128 * 4 * 2 + 4 + 4), 2 * 5120 * 3),
        (Choice(3, "greedy", 128256, BF16), 3 * (128256 * 2 + 40), 3 * 128256),
        (Choice(1, "top-p", 128256, BF16), 128256 * 2 + 40, 128256 * 38),
        # One node: four numbers, first_node's two, and a row of length, is finite, one token.
        (Walk(1, 1), 4 * (4 + 2 + 3), 0),
        (MoveSlots(4, Dims(), BF16), 4 * (2 * 32 * 2 * 8 * 128 * 2 + 8), 0),
    ],
    ids=str,
)
def test_counts_of_small_ops(case: KernelCase, num_bytes: int, num_flops: int) -> None:
    assert (case.num_bytes, case.num_flops) == (num_bytes, num_flops)


def test_the_floor_is_the_slower_of_copy_and_product() -> None:
    ceilings = Ceilings(copy_rate=100.0, gemm_rate=1000.0)
    assert ceilings.floor(200, 500) == 2.0
    assert ceilings.floor(200, 5000) == 5.0


def test_the_cases_cover_every_op_and_fit() -> None:
    full, quick = gpu_cases(is_quick=False), gpu_cases(is_quick=True)
    assert {case.op for case in quick} == {case.op for case in full}
    assert len({name(case) for case in full}) == len(full) and len(quick) <= len(full) / 6
    assert max(case.num_bytes for case in full) < 40e9
    kinds = {case.op.split(" fast")[0] for case in full if "fp8" not in case.op}
    assert {case.op.split(" fast")[0] for case in cpu_cases(is_quick=True)} <= kinds


# --- the gate ---


@pytest.mark.parametrize("case", TINY_CASES, ids=name)
def test_kernels_pass_the_gate_and_are_timed(case: KernelCase) -> None:
    """With two input sets, so that they are seen to be apart."""
    place = Place(DEVICE, uses_kernels=True, footprint=2 * case.num_bytes)
    (row,) = kernel_bench.measure_cases([case], place, TIMER, CEILINGS)
    assert row["problem"] is None
    assert row["num_sets"] == 2 and row["seconds"] > 0
    assert row["ratio"] == pytest.approx(row["seconds"] / row["floor_s"])
    assert row["percent_of_ceiling"] == pytest.approx(100 / row["ratio"])


@pytest.mark.parametrize(
    "case",
    [
        TreeAttention(40, 1, 1, TINY, FP32),
        TreeAttention(40, 5, 2, TINY, FP32),
        RmsNorm(2, TINY.hidden, FP32),
        RmsNorm(2, TINY.hidden, FP32, has_delta=True),
        SiluMul(3, TINY.inner, FP32),
        RopeWrite(3, TINY, FP32),
        Choice(20, "greedy", TINY.vocab_size, FP32),
        Choice(20, "temperature", TINY.vocab_size, FP32),
        Choice(20, "top-p", TINY.vocab_size, FP32),
        Walk(20, 9),
        MoveSlots(10, TINY, FP32),
    ],
    ids=name,
)
def test_references_pass_the_gate(case: KernelCase) -> None:
    assert accuracy(case.prepare(REFERENCES)).is_ok


def off(tensor: Tensor) -> Tensor:
    return tensor * 1.01 if tensor.is_floating_point() else tensor + 1


BROKEN: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "tree_attention": (tree_attention, "tree_attention", lambda q, *_, **__: torch.empty_like(q)),
    "rms_norm": (norm_rope, "rms_norm", lambda x, w, eps, dtype: off(x.to(dtype))),
    "add_rms_norm": (norm_rope, "add_rms_norm", lambda x, d, w, eps, dtype: (x, x.to(dtype))),
    "silu_mul": (norm_rope, "silu_mul", lambda x: x[:, : x.shape[1] // 2] * 0),
    "rope_write": (kv_slots, "rope_write", lambda qkv, *_, num_heads: qkv.view(3, -1, 16)[:, :4]),
    "choice": (gumbel_argmax, "gumbel_argmax", lambda x, *_: (x[:, 0].int(), x[:, 0].int())),
    "tree_walk": (tree_walk, "tree_walk", lambda c, *_: TreeWalk(torch.zeros_like(c)[None])),
    "move_slots": (kv_slots, "move_slots", lambda data, src, dst: None),
}


@pytest.mark.parametrize("case", TINY_CASES, ids=name)
def test_a_wrong_op_fails_the_gate_and_is_not_timed(case: KernelCase) -> None:
    module, attribute, wrong = BROKEN[case.op.split()[0]]
    with patch.object(module, attribute, wrong):
        (row,) = kernel_bench.measure_cases([case], KERNELS, TIMER, CEILINGS)
    assert row["problem"].startswith("WrongResult: ")
    assert row["seconds"] is None


@pytest.mark.parametrize("case", TINY_CASES, ids=name)
def test_a_slightly_wrong_op_fails_the_gate(case: KernelCase) -> None:
    """One in a hundred, or one more: in the results, or in the cache that was written."""
    module, attribute, _ = BROKEN[case.op.split()[0]]
    real = getattr(module, attribute)

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        if attribute == "rope_write":
            arguments[6].copy_(off(arguments[6]))  # the values' cache
        if attribute == "move_slots":
            arguments[0][1, 1] = off(arguments[0][1, 1])
        if attribute in ("rope_write", "move_slots"):
            return found
        if isinstance(found, TreeWalk):
            return TreeWalk(off(found.buffer))
        return (off(found[0]), *found[1:]) if isinstance(found, tuple) else off(found)

    with patch.object(module, attribute, wrong):
        found = accuracy(case.prepare(KERNELS))
    assert not found.is_ok


@pytest.mark.parametrize(
    ("got", "want", "is_ok"),
    [
        (torch.ones(3), Expected(torch.ones(3).double() + 9e-6, torch.ones(3)), True),
        (torch.ones(3), Expected(torch.ones(3).double() + 11e-6, torch.ones(3)), False),
        (torch.full((3,), NAN), Expected(torch.ones(3).double(), torch.ones(3)), False),
        (torch.ones(3), Expected(torch.full((3,), NAN).double(), torch.ones(3)), False),
        (torch.ones(2), Expected(torch.ones(3).double(), torch.ones(3)), False),
        (torch.tensor([1, NAN]), Expected(torch.tensor([1, NAN]), torch.ones(2)), True),
        (torch.tensor([1.0, 5]), Expected(torch.tensor([1, NAN]), torch.ones(2)), False),
        (torch.tensor([1, 2]), Expected(torch.tensor([1, 2])), True),
        (torch.tensor([1, 2]), Expected(torch.tensor([1, 3])), False),
        (torch.ones(1).half() * 1.01, Expected(torch.ones(1).double(), torch.ones(1) * 1.02), True),
        (
            torch.ones(1).half() * 1.03,
            Expected(torch.ones(1).double(), torch.ones(1) * 1.01),
            False,
        ),
    ],
)
def test_bounds(got: Tensor, want: Expected, is_ok: bool) -> None:
    found = accuracy(Prepared([lambda: (got,)], lambda: [want]))
    assert found.is_ok == is_ok
    assert not Accuracy(NAN, 1.0).is_ok


def test_results_start_as_nan_while_they_are_checked() -> None:
    with poisoned_results():
        assert torch.empty(3, device=DEVICE).isnan().all()
        assert torch.empty_like(torch.zeros(3, device=DEVICE, dtype=FP16)).isnan().all()
        assert (torch.empty(3, device=DEVICE, dtype=torch.int32) == 2**31 - 1).all()
    assert not torch.are_deterministic_algorithms_enabled()
