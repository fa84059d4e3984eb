"""The 8-bit floats of the KV cache: the bits of PyTorch's conversion, and exact fp16 of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.e4m3 import E4M3_SHIFT, from_e4m3, to_e4m3
from tests.kernels.device import DEVICE

E4M3 = torch.float8_e4m3fn


@triton.jit
def encode_all(x: Any, out: Any, size: Any) -> None:
    places = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(out + places, to_e4m3(tl.load(x + places, places < size)), places < size)


@triton.jit
def decode_all(bits: Any, out: Any) -> None:
    places = tl.arange(0, 256)
    tl.store(out + places, from_e4m3(tl.load(bits + places)))


def near(x: Tensor) -> Tensor:
    """fp32 numbers x with their neighbours on either side, and all of them negated."""
    inf = torch.tensor(float("inf"))
    x = torch.cat((x, x.nextafter(inf), x.nextafter(-inf)))
    return torch.cat((x, -x))


def test_to_e4m3_is_torchs_conversion() -> None:
    """At every number, every halfway case and their neighbours; zeros; and random bits."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    assert numbers[-1] == 448
    halfway = torch.tensor([(a + b) / 2 for a, b in pairwise(numbers.tolist())])
    tiny = torch.tensor([1, 2, 0x7FFFFF, 0x800000], dtype=torch.int32).view(torch.float32)
    large = torch.tensor([464.0, 480.0, 512.0, 65504.0, 3.4028234e38])
    anything = torch.randint(-(2**31), 2**31, (2**18,), generator=torch.Generator().manual_seed(0))
    anything = anything.to(torch.int32).view(torch.float32)
    x = torch.cat((near(torch.cat((numbers, halfway, tiny, large))), anything)).to(DEVICE)
    out = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
    encode_all[(triton.cdiv(len(x), 4096),)](x, out, len(x))
    want = x.clamp(-448, 448).to(E4M3).view(torch.uint8)
    assert torch.equal(out, want)
    assert len(out.unique()) == 256  # -0 and NaN of either sign among them


def test_from_e4m3_is_exact() -> None:
    bits = torch.arange(256, dtype=torch.int32, device=DEVICE).to(torch.uint8)
    out = torch.empty(256, dtype=torch.float16, device=DEVICE)
    decode_all[(1,)](bits, out)
    numbers = bits.view(E4M3).double()
    is_number = ~numbers.isnan()
    assert torch.equal(out.double()[is_number] * E4M3_SHIFT, numbers[is_number])
    assert torch.equal(out.signbit(), bits >= 128)  # -0 is not 0
