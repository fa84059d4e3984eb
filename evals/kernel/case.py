"""KernelCase: one op at one size, what it must move and compute, and whether it comes out right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Results = tuple[Tensor, ...]
Call = Callable[[], Results]

FP32_BOUND = 1e-5
MAX_SETS = 1024  # of inputs: one launch each in a recorded graph


@dataclass(frozen=True)
class Dims:
    """Sizes of the model whose ops are measured; an 8B Llama 3 if nothing else is said."""

    hidden: int = 4096
    inner: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 128256
    num_layers: int = 32
    block_size: int = 32


@dataclass(frozen=True)
class Place:
    """Where cases run, and as what: Triton's kernels or the PyTorch references.

    `footprint` are the bytes that a case's input sets should fill together, more than any cache
    holds, so that each launch finds its input in memory; 0 = one set is enough.
    """

    device: torch.device
    uses_kernels: bool
    footprint: int = 0

    def num_sets(self, num_bytes: int, most: int = MAX_SETS) -> int:
        """Input sets of `num_bytes` each, at most `most`."""
        return max(1, min(most, -(-self.footprint // num_bytes)))

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, dtype=dtype, device=self.device)

    def integers(self, values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        """Integers from the host."""
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Expected:
    """One right result: `exact` in fp64, with `plain` PyTorch's in the result's dtype.

    NaN stands where the op must write nothing. Without `plain` results must be equal.
    """

    exact: Tensor
    plain: Tensor | None = None


@dataclass(frozen=True)
class Prepared:
    """A case in memory: a call per input set, and what the first of them must give."""

    calls: Sequence[Call]
    expect: Callable[[], Sequence[Expected]]  # asked before the first call, which may write


class KernelCase(Protocol):
    """One op at one size. `num_bytes` and `num_flops` are what any implementation must do."""

    @property
    def op(self) -> str:
        """Name of the op and of its kind; cases of one op are summed up in one line."""

    @property
    def label(self) -> str:
        """The size, as text."""

    @property
    def num_bytes(self) -> int:
        """Bytes read and written once."""

    @property
    def num_flops(self) -> int:
        """Floating-point operations; 0 for an op that only moves."""

    def prepare(self, place: Place) -> Prepared:
        """Allocate random inputs on the place's device."""


@dataclass(frozen=True)
class Accuracy:
    """Relative error ||got - exact|| / ||exact||, or for integers how many differ."""

    error: float
    bound: float

    @property
    def is_ok(self) -> bool:
        """NaN is not."""
        return self.error <= self.bound


def accuracy(prepared: Prepared) -> Accuracy:
    """Run the first call over poisoned memory and compare; the worst of its results.

    fp32 results must be within FP32_BOUND; fp16 and bf16 may be off by twice the error of plain
    PyTorch in that dtype (the rule of flash-attention's tests).
    """
    wanted = prepared.expect()
    with poisoned_results():
        results = prepared.calls[0]()
    parts = [_accuracy(got, want) for got, want in zip(results, wanted, strict=True)]
    return max(parts, key=lambda part: (not part.is_ok, part.error))


@contextmanager
def poisoned_results() -> Iterator[None]:
    """Within it new memory holds NaN, or the largest integer, until it is written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.utils.deterministic: fills what is empty
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _accuracy(got: Tensor, want: Expected) -> Accuracy:
    if got.shape != want.exact.shape:
        return Accuracy(float("inf"), 0.0)
    if want.plain is None:
        return Accuracy(float((got != want.exact).sum()), 0.0)
    error = _relative_error(got, want.exact)
    if got.dtype == torch.float32:
        return Accuracy(error, FP32_BOUND)
    return Accuracy(error, 2 * _relative_error(want.plain, want.exact))


def _relative_error(got: Tensor, exact: Tensor) -> float:
    is_nothing = exact.isnan()
    if not torch.equal(got.isnan(), is_nothing):
        return float("nan")
    got, exact = (x.double().masked_fill(is_nothing, 0.0) for x in (got, exact))
    return float((got - exact).norm() / exact.norm())
