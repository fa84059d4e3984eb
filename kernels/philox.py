"""Philox and Gumbel noise inside Triton kernels: the bits of `specdec.noise` on any device.

A kernel that calls `gumbel` or `negative_log` must be launched with enable_fp_fusion=False: the
additions and multiplications below are rounded one by one. The constants are explained there.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUND_A = tl.constexpr(0xD2511F53)
ROUND_B = tl.constexpr(0xCD9E8D57)
WEYL_A = tl.constexpr(0x9E3779B9)
WEYL_B = tl.constexpr(0xBB67AE85)
NUM_ROUNDS = tl.constexpr(10)
SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
MANTISSA = tl.constexpr(0x7FFFFF)
MINUS_LN2 = tl.constexpr(float.fromhex("-0x1.62e430p-1"))
ATANH_0 = tl.constexpr(float.fromhex("0x1.55557ap-2"))
ATANH_1 = tl.constexpr(float.fromhex("0x1.995eb6p-3"))
ATANH_2 = tl.constexpr(float.fromhex("0x1.31e34cp-3"))


@triton.jit
def philox(
    group: tl.tensor, position: tl.tensor, seed: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Philox4x32-10 (Salmon et al. 2011) with counter (group, position, 0, 0), the Gumbel stream.

    group: uint32 [m], token_id // 4; position: int32 scalar; seed: int64 scalar. Returns four
    uint32 [m], the words of tokens 4 * group + 0, 1, 2, 3.
    """
    key_a = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_b = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = group
    c1 = tl.zeros_like(group) + position.to(tl.uint32)
    c2 = tl.zeros_like(group)
    c3 = tl.zeros_like(group)
    for _ in tl.static_range(NUM_ROUNDS):
        low_a = c0 * ROUND_A
        low_b = c2 * ROUND_B
        high_a = tl.umulhi(ROUND_A, c0)
        high_b = tl.umulhi(ROUND_B, c2)
        c0 = high_b ^ c1 ^ key_a
        c2 = high_a ^ c3 ^ key_b
        c1 = low_b
        c3 = low_a
        key_a += WEYL_A
        key_b += WEYL_B
    return c0, c1, c2, c3


@triton.jit
def octave(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """x = mantissa * 2^exponent, a mantissa in [sqrt(1/2), sqrt(2)). fp32 to int32 and fp32."""
    above = x.to(tl.int32, bitcast=True) - SQRT_HALF_BITS
    return above >> 23, ((above & MANTISSA) + SQRT_HALF_BITS).to(tl.float32, bitcast=True)


@triton.jit
def negative_log_1m(exponent: tl.tensor, below_one: tl.tensor) -> tl.tensor:
    """-log((1 - below_one) * 2^exponent); int32 and fp32 of one shape, to fp32."""
    ratio = tl.div_rn(below_one, 2.0 - below_one)
    square = ratio * ratio
    series = (((square * ATANH_2) + ATANH_1) * square + ATANH_0) * square
    twice = ratio + ratio
    return (series * twice + twice) + exponent.to(tl.float32) * MINUS_LN2


@triton.jit
def negative_log(x: tl.tensor) -> tl.tensor:
    """-log(x) of positive normal fp32 numbers, any shape."""
    exponent, mantissa = octave(x)
    return negative_log_1m(exponent, 1.0 - mantissa)


@triton.jit
def gumbel(word: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of random words. word: uint32, any shape. Returns fp32."""
    uniform = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponent, mantissa = octave(rest)
    below_one = tl.where(exponent < 0, 1.0 - mantissa, uniform)
    return negative_log(negative_log_1m(exponent, below_one))
