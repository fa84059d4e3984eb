"""Where kernel tests run: on the GPU if there is one, else under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's bf16 products are wrong; a GPU's are right.
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if DEVICE.type == "cuda" else ()))

needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="no CUDA device is visible")


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers on DEVICE, the same on every device."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE, dtype)


def check_error(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """fp32: within 1e-5 of the exact result; else an error at most twice that of plain PyTorch.

    got: what is tested; plain: PyTorch in got's dtype; exact: the same in fp32 or fp64. Plus two
    units in the last place of the largest result, for a plain result may be right by luck.
    """
    assert got.shape == exact.shape
    error = (got.double() - exact.double()).abs().max()
    if got.dtype == torch.float32:
        assert error <= 1e-5 * max(1.0, float(exact.abs().max()))
        return
    unit = torch.finfo(got.dtype).eps * exact.double().abs().max()
    assert error <= 2 * (plain.double() - exact.double()).abs().max() + 2 * unit
