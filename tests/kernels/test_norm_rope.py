"""RMS norm, its residual form and silu(gate) * up as Triton kernels, against their plain forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.kernels import norm_rope, reference
from tests.kernels.device import DTYPES, check_error, randn
from tests.kernels.guard import guarded_results, surrounded

EPS = 1e-5
# Powers of two, the built-in model's, odd ones, and two that take more than one block.
DIMS = (1, 16, 80, 577, 576, 1536, 4096, norm_rope.MAX_NORM_BLOCK + 1, 40000)


def literal_norm(x: Tensor, weight: Tensor) -> Tensor:
    """In fp64, from the formula."""
    x, weight = x.double(), weight.double()
    return x * weight / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def rows_to_norm(num_rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """Rows of very different sizes, with NaN before the first and behind the last, and a weight."""
    x = randn(num_rows, dim, seed=dim)
    x[0] *= 1e-4  # where eps matters
    x[1:2] *= 300
    return surrounded(x), surrounded(1 + randn(dim, seed=dim + 1) / 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_rms_norm(dim: int, dtype: torch.dtype) -> None:
    x, weight = rows_to_norm(3, dim)
    with guarded_results(norm_rope):
        got = norm_rope.rms_norm(x, weight, EPS, dtype)
    assert got.dtype == dtype
    plain = reference.rms_norm(x, weight, EPS).to(dtype)
    check_error(got, plain, literal_norm(x, weight))
    check_error(got[:1], plain[:1], literal_norm(x[:1], weight))  # by its own, small size


@pytest.mark.parametrize("delta_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_add_rms_norm(dim: int, dtype: torch.dtype, delta_dtype: torch.dtype) -> None:
    x, weight = rows_to_norm(3, dim)
    delta = surrounded(randn(3, dim, seed=dim + 2).to(delta_dtype))
    before = x.clone(), delta.clone()
    with guarded_results(norm_rope):
        total, got = norm_rope.add_rms_norm(x, delta, weight, EPS, dtype)
    assert got.dtype == dtype
    assert torch.equal(total, x + delta.float())
    plain = reference.rms_norm(total, weight, EPS).to(dtype)
    check_error(got, plain, literal_norm(total, weight))
    assert torch.equal(x, before[0])
    assert torch.equal(delta, before[1])


@pytest.mark.parametrize("dim", [577, norm_rope.MAX_NORM_BLOCK + 1])
def test_the_residual_form_is_sum_and_norm(dim: int) -> None:
    """Bit for bit: the first layer's norm has no delta, and prefix hits must not show it."""
    x, weight = rows_to_norm(3, dim)
    delta = randn(3, dim, seed=5)
    total, got = norm_rope.add_rms_norm(x, delta, weight, EPS, torch.float16)
    assert torch.equal(got, norm_rope.rms_norm(total, weight, EPS, torch.float16))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "dim"), [(1, 48), (5, 7), (3, 1531), (2, 1536), (1, 14336)])
def test_silu_mul(num_rows: int, dim: int, dtype: torch.dtype) -> None:
    gate_up = surrounded((4 * randn(num_rows, 2 * dim, seed=dim)).to(dtype))
    gate, up = gate_up.double().chunk(2, dim=1)
    with guarded_results(norm_rope):
        got = norm_rope.silu_mul(gate_up)
    assert got.dtype == dtype
    check_error(got, reference.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_silu_of_extreme_gates() -> None:
    """exp(-gate) is infinite below -88; the product is zero, not NaN."""
    gate = torch.tensor([-1e4, -100.0, -88.0, 0.0, 88.0, 1e4])
    gate_up = torch.cat((gate, torch.full((6,), 2.0)))[None].to(randn(1, seed=0).device)
    got = norm_rope.silu_mul(gate_up)
    check_error(got, got, reference.silu_mul(gate_up).double())
    assert got[0, 5] == 2e4


@pytest.mark.parametrize("dim", [577, 4096, norm_rope.MAX_NORM_BLOCK + 1])
def test_a_row_is_its_own_business(dim: int) -> None:
    """The same bits alone, in a batch of any size, at any place, and beside NaN."""
    x, weight = rows_to_norm(5, dim)
    delta = randn(5, dim, seed=7)
    order = torch.tensor([3, 0, 4, 2, 1], device=x.device)

    def results(x: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        gate_up = torch.cat((x / 300, delta), dim=1).half()
        return (
            norm_rope.rms_norm(x, weight, EPS, torch.float16),
            *norm_rope.add_rms_norm(x, delta, weight, EPS, torch.float16),
            norm_rope.silu_mul(gate_up),
        )

    whole = results(x, delta)
    shuffled = results(x[order], delta[order])
    for row in range(5):
        beside_nan = torch.full_like(x, float("nan"))
        beside_nan[row] = x[row]
        alone = results(x[row : row + 1], delta[row : row + 1])
        poisoned = results(beside_nan, delta)
        for want, *others in zip(whole, alone, poisoned, strict=True):
            assert torch.equal(others[0][0], want[row])
            assert torch.equal(others[1][row], want[row])
    for want, got in zip(whole, shuffled, strict=True):
        assert torch.equal(got, want[order])


def test_no_rows() -> None:
    x, weight = torch.empty(0, 16, device=randn(1, seed=0).device), randn(16, seed=1)
    assert norm_rope.rms_norm(x, weight, EPS, torch.float16).shape == (0, 16)
    assert norm_rope.add_rms_norm(x, x, weight, EPS, torch.float16)[1].shape == (0, 16)
    assert norm_rope.silu_mul(x).shape == (0, 8)


def test_variants_name_every_argument() -> None:
    variants = list(norm_rope.variants())
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        names = [*variant.signature, *variant.constants]
        assert sorted(names) == sorted(variant.kernel.arg_names)
