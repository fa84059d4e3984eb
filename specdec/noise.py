"""GumbelNoise: counter-based noise keyed by (seed, position, token id).

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with key = the
64-bit seed and counter = (token_id // 4, position, stream, 0); word token_id % 4 is the token's.

Any device gives the same bits: the generator is integer arithmetic, and what turns its words into
Gumbel noise is fp32 additions, multiplications and divisions, which IEEE 754 rounds in one way
only, in one order and never fused. `kernels/philox.py` is the same on a GPU, and
`kernels/native/noise.hpp` in C++, in a tenth of the time, once it has been loaded.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_NUM_ROUNDS = 10

GUMBEL_STREAM, COIN_STREAM = 0, 1

_native: ctypes.CDLL | None = None


def use_native(library: ctypes.CDLL | None) -> None:
    """Let the native library make noise on the CPU from now on, and choose tokens with it.

    None = PyTorch. The same bits.
    """
    global _native
    _native = library


def native() -> ctypes.CDLL | None:
    """The library that `use_native` was given."""
    return _native


# Numbers that fp32 holds exactly, so that no library has to round them; as tensors, for torch
# spends more time on wrapping a plain number than on a small operation.
_SQRT_HALF_BITS = torch.tensor(0x3F3504F3, dtype=torch.int32)  # sqrt(1/2): an octave's beginning
_MANTISSA = torch.tensor(0x7FFFFF, dtype=torch.int32)
_HALF, _ONE, _TWO, _ULP_32 = (torch.tensor(x) for x in (0.5, 1.0, 2.0, 2.0**-32))
_MINUS_LN2 = torch.tensor(float.fromhex("-0x1.62e430p-1"))
# (atanh(s) - s) / s^3 as a polynomial in s^2, minimax for |s| <= (sqrt(2) - 1) / (sqrt(2) + 1).
_ATANH_0 = torch.tensor(float.fromhex("0x1.55557ap-2"))
_ATANH_1 = torch.tensor(float.fromhex("0x1.995eb6p-3"))
_ATANH_2 = torch.tensor(float.fromhex("0x1.31e34cp-3"))


def philox(counter: tuple[Tensor, int | Tensor, int, int], seed: int) -> Tensor:
    """Philox4x32-10 over a vector of first counter words.

    counter[0]: int64 [n] holding 32-bit words, as counter[1] may be. Returns int64 [n, 4] of
    32-bit words.
    """
    key_a, key_b = seed & _MASK, seed >> 32 & _MASK
    # Three words start as plain numbers and stay so until a tensor meets them.
    words: list[Any] = [counter[0], *(word & _MASK for word in counter[1:])]
    for _ in range(_NUM_ROUNDS):
        c0, c1, c2, c3 = words
        # 32x32-bit products wrap in int64; shift and mask recover the unsigned halves.
        low_b, low_a = c2 * _ROUND_B, c0 * _ROUND_A
        high_b, high_a = low_b >> 32, low_a >> 32
        # In place, which is half of the speed; no caller's tensor is among them.
        high_b &= _MASK
        high_a &= _MASK
        low_b &= _MASK
        low_a &= _MASK
        c1 ^= key_a
        c3 ^= key_b
        high_b ^= c1
        high_a ^= c3
        words = [high_b, low_b, high_a, low_a]
        key_a, key_b = key_a + _WEYL_A & _MASK, key_b + _WEYL_B & _MASK
    return torch.stack(words, dim=1)


def gumbel(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for the given tokens at an absolute position.

    token_ids: int64 [n]. Returns fp32 [n]. A token's noise does not depend on which other
    tokens are asked for.

    Example: `gumbel(7, 12, torch.tensor([5]))[0] == gumbel(7, 12, torch.arange(10))[5]`.
    """
    if _native is not None and token_ids.device.type == "cpu":
        return _native_gumbel(seed, torch.full_like(token_ids, position), token_ids)
    groups, inverse = torch.unique(token_ids >> 2, return_inverse=True)
    words = philox((groups, position, GUMBEL_STREAM, 0), seed)[inverse, token_ids & 3]
    return gumbel_of_words(words)


def gumbel_at(seed: int, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The noise of several positions at once, for tokens of each; the same values as `gumbel`.

    positions: int64 [n]; token_ids: int64 [n, k]. Returns fp32 [n, k].
    """
    flat = token_ids.flatten()
    where = positions.repeat_interleave(token_ids.shape[1])
    if _native is not None and flat.device.type == "cpu":
        return _native_gumbel(seed, where, flat).view(token_ids.shape)
    words = philox((flat >> 2, where, GUMBEL_STREAM, 0), seed)
    picked = words.gather(1, (flat & 3)[:, None])[:, 0]
    return gumbel_of_words(picked).view(token_ids.shape)


def gumbel_all(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel noise of the whole vocabulary; the same values as `gumbel`. fp32 [vocab]."""
    if _native is not None and device.type == "cpu":
        noise = torch.empty(vocab_size)
        _native.specdec_gumbel_all(seed, position, vocab_size, noise.data_ptr())
        return noise
    groups = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=device)
    words = philox((groups, position, GUMBEL_STREAM, 0), seed).flatten()[:vocab_size]
    return gumbel_of_words(words)


def _native_gumbel(seed: int, positions: Tensor, token_ids: Tensor) -> Tensor:
    assert _native is not None
    positions, token_ids = positions.contiguous(), token_ids.contiguous()
    noise = torch.empty(len(token_ids))
    _native.specdec_gumbel_of(
        seed, positions.data_ptr(), token_ids.data_ptr(), len(token_ids), noise.data_ptr()
    )
    return noise


def gumbel_of_words(words: Tensor) -> Tensor:
    """-log(-log1p(-u)) for u = (word + 1/2) / 2^32: Gumbel noise, within 4e-7 * max(1, |noise|).

    words: int64 [...] of 32-bit words. Returns fp32 [...]. Both u and 1 - u are converted from the
    word itself, so that neither tail loses digits: the upper one, u near 0, decides the argmax.
    """
    uniform = words.float().add_(_HALF).mul_(_ULP_32)
    exponent, mantissa = _octave((words ^ _MASK).float().add_(_HALF).mul_(_ULP_32))
    # 1 - mantissa has lost u's digits where 1 - u is in the first octave. Blended by bits: a
    # branch as random as this one would cost more than all the rest.
    small = uniform.view(torch.int32)
    blend = (_ONE - mantissa).view(torch.int32)
    blend.bitwise_xor_(small).bitwise_and_(exponent >> 31).bitwise_xor_(small)
    return negative_log(_negative_log(exponent, blend.view(torch.float32)))


def negative_log(x: Tensor) -> Tensor:
    """-log(x), within 2e-7 * max(1, |log(x)|), the same bits on every device.

    x: fp32 [...], positive and normal. Returns fp32 [...].
    """
    exponent, mantissa = _octave(x)
    return _negative_log(exponent, _ONE - mantissa)


def _octave(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = mantissa * 2^exponent with a mantissa in [sqrt(1/2), sqrt(2)). fp32 to int32, fp32."""
    above = x.view(torch.int32) - _SQRT_HALF_BITS
    return above >> 23, (above & _MANTISSA).add_(_SQRT_HALF_BITS).view(torch.float32)


def _negative_log(exponent: Tensor, below_one: Tensor) -> Tensor:
    """-log((1 - below_one) * 2^exponent) = 2 atanh(s) - exponent * ln 2, s = b / (2 - b).

    One rounding per operation in an order that `kernels/philox.py` repeats line by line.
    """
    ratio = below_one / (_TWO - below_one)
    square = ratio * ratio
    series = (square * _ATANH_2).add_(_ATANH_1).mul_(square).add_(_ATANH_0).mul_(square)
    twice = ratio.add_(ratio)
    series.mul_(twice).add_(twice)
    return series.add_(exponent.float().mul_(_MINUS_LN2))


def coin(seed: int, position: int, index: int) -> float:
    """A uniform number in (0, 1) for the index-th accept decision at a position."""
    counter = torch.tensor([index], dtype=torch.int64)
    word = int(philox((counter, position, COIN_STREAM, 0), seed)[0, 0])
    return (word + 0.5) * 2.0**-32
