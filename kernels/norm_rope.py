"""Triton kernels between the matrix products: RMS norm with the residual sum, and silu(gate) * up.

Arithmetic is fp32 and rounds to the result's dtype once. A row is one program's, or one program's
per tile, and block and warps depend on the row's size alone: what stands beside it cannot matter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.variant import Variant

MAX_NORM_BLOCK = 16384  # a longer row is read twice, block by block, instead of held in registers
SILU_BLOCK = 1024


@triton.jit
def _summed(
    x: tl.tensor,
    delta: tl.tensor,
    places: tl.tensor,
    inside: tl.tensor,
    HAS_DELTA: tl.constexpr,
) -> tl.tensor:
    values = tl.load(x + places, mask=inside, other=0.0)
    if HAS_DELTA:
        values += tl.load(delta + places, mask=inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def _rms_norm(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * DIM
    columns = tl.arange(0, BLOCK)
    if DIM <= BLOCK:
        inside = columns < DIM
        places = first + columns
        values = _summed(x, delta, places, inside, HAS_DELTA)
        scale = tl.rsqrt(tl.sum(values * values) / DIM + eps)
        normed = values * scale * tl.load(weight + columns, mask=inside, other=0.0)
        if HAS_DELTA:
            tl.store(total + places, values, mask=inside)
        tl.store(out + places, normed.to(out.dtype.element_ty), mask=inside)
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, DIM, BLOCK):
            inside = start + columns < DIM
            values = _summed(x, delta, first + start + columns, inside, HAS_DELTA)
            squares += values * values
        scale = tl.rsqrt(tl.sum(squares) / DIM + eps)
        for start in range(0, DIM, BLOCK):
            inside = start + columns < DIM
            places = first + start + columns
            values = _summed(x, delta, places, inside, HAS_DELTA)
            normed = values * scale * tl.load(weight + start + columns, mask=inside, other=0.0)
            if HAS_DELTA:
                tl.store(total + places, values, mask=inside)
            tl.store(out + places, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_up: tl.tensor, out: tl.tensor, DIM: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < DIM
    first = gate_up + row * (2 * DIM)
    gate = tl.load(first + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + DIM + columns, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * DIM + columns, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x * weight / sqrt(mean(x^2) + eps) in `dtype` (Zhang & Sennrich 2019).

    x: fp32 [rows, dim]; weight: fp32 [dim]. Any dim; the plain form is reference.rms_norm.
    """
    _check_norm(x, weight)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block, num_warps = _norm_launch(x.shape[1])
    # Without a delta the kernel touches neither the second pointer nor the fourth.
    _rms_norm[(x.shape[0],)](
        x, x, weight, x, out, eps, x.shape[1], block, False, num_warps=num_warps
    )
    return out


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The residual sum x + delta in fp32, and its RMS norm in `dtype`, in one pass.

    x: fp32 [rows, dim]; delta: any dtype [rows, dim]; weight: fp32 [dim]. Neither is overwritten.
    """
    _check_norm(x, weight)
    assert delta.shape == x.shape
    assert delta.is_contiguous()
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block, num_warps = _norm_launch(x.shape[1])
    _rms_norm[(x.shape[0],)](
        x, delta, weight, total, out, eps, x.shape[1], block, True, num_warps=num_warps
    )
    return total, out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU: Shazeer 2020) for fused [rows, 2 * dim]; returns [rows, dim].

    In gate_up's dtype, rounded once. The plain form is reference.silu_mul.
    """
    assert gate_up.is_contiguous()
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, dim, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(dim, SILU_BLOCK))
    _silu_mul[grid](gate_up, out, dim, SILU_BLOCK, num_warps=4)
    return out


def variants() -> Iterator[Variant]:
    """The forms that models of hidden size 576, 4096 and 8192 need."""
    for name in ("bf16", "fp16", "fp32"):
        for dim in (576, 4096, 8192):
            yield _norm_variant(name, dim, has_delta=False)
            yield _norm_variant(name, dim, has_delta=True)
        for dim in (1536, 14336, 28672):
            yield Variant(
                f"silu_mul {name} {dim}",
                _silu_mul,
                {"gate_up": f"*{name}", "out": f"*{name}"},
                {"DIM": dim, "BLOCK": SILU_BLOCK},
                {"num_warps": 4},
                is_hot=name == "bf16",
            )
    yield _norm_variant("bf16", 2 * MAX_NORM_BLOCK, has_delta=True)


def _check_norm(x: Tensor, weight: Tensor) -> None:
    assert x.dtype == weight.dtype == torch.float32
    assert weight.shape == x.shape[1:]
    assert x.is_contiguous()
    assert weight.is_contiguous()


def _norm_launch(dim: int) -> tuple[int, int]:
    """Block and number of warps for rows of `dim` numbers."""
    block = min(MAX_NORM_BLOCK, triton.next_power_of_2(dim))
    return block, min(16, max(4, block // 512))


def _norm_variant(name: str, dim: int, *, has_delta: bool) -> Variant:
    block, num_warps = _norm_launch(dim)
    return Variant(
        f"{'add_' if has_delta else ''}rms_norm {name} {dim}",
        _rms_norm,
        {
            "x": "*fp32",
            "delta": f"*{name if has_delta else 'fp32'}",
            "weight": "*fp32",
            "total": "*fp32",
            "out": f"*{name}",
            "eps": "fp32",
        },
        {"DIM": dim, "BLOCK": block, "HAS_DELTA": has_delta},
        {"num_warps": num_warps},
        is_hot=name == "bf16",
    )
