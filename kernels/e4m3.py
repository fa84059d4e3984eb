"""8-bit floats e4m3fn for the KV cache, by integer arithmetic: every GPU gives the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

# What `from_e4m3` leaves out: its numbers are this many times too small.
E4M3_SHIFT = 256.0


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """Round fp32 to the bits of float8_e4m3fn (Micikevicius et al. 2022), ties to even; uint8.

    Magnitudes over 448, infinity too, become 448; NaN stays NaN (0x7F). Equal to
    `x.clamp(-448, 448).to(torch.float8_e4m3fn)` in every bit. Instructions that convert exist only
    from sm_89 on, and AMD's gfx942 has another format by that name.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x43E00000)  # 448
    # Keep 3 of the 23 mantissa bits: add half less one, plus one if the last kept bit is odd. A
    # carry runs into the exponent, whose bias falls from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, the last place of 2^14: the addition rounds, ties to even.
    lifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = lifted.to(tl.int32, bitcast=True) - 0x46800000  # 2^14
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)  # 2^-6
    return (sign | tl.where(is_nan, 0x7F, code)).to(tl.uint8)


@triton.jit
def from_e4m3(bits: tl.tensor) -> tl.tensor:
    """The number of e4m3fn bits divided by E4M3_SHIFT, exactly; uint8 to fp16.

    The fields of both formats line up after a shift by 7, subnormal numbers too; only the bias of
    the exponent differs (7 against 15), hence 2^-8, which the caller multiplies back where it costs
    nothing. NaN comes out as 480 / E4M3_SHIFT.
    """
    wide = bits.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
