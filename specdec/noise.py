"""GumbelNoise: counter-based noise keyed by (seed, position, token id).

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with key = the
64-bit seed and counter = (token_id // 4, position, stream, 0); word token_id % 4 is the token's.
The generator is written in integer tensor operations, so any device gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_NUM_ROUNDS = 10

GUMBEL_STREAM, COIN_STREAM = 0, 1


def philox(counter: tuple[Tensor, int, int, int], seed: int) -> Tensor:
    """Philox4x32-10 over a vector of first counter words.

    counter[0]: int64 [n] holding 32-bit words. Returns int64 [n, 4] of 32-bit words.
    """
    key_a, key_b = seed & _MASK, seed >> 32 & _MASK
    c0 = counter[0]
    c1, c2, c3 = (torch.full_like(c0, word & _MASK) for word in counter[1:])
    for _ in range(_NUM_ROUNDS):
        # 32x32-bit products wrap in int64; shift and mask recover the unsigned halves.
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B
        c0 = (product_b >> 32 & _MASK) ^ c1 ^ key_a
        c2 = (product_a >> 32 & _MASK) ^ c3 ^ key_b
        c1, c3 = product_b & _MASK, product_a & _MASK
        key_a, key_b = key_a + _WEYL_A & _MASK, key_b + _WEYL_B & _MASK
    return torch.stack((c0, c1, c2, c3), dim=1)


def gumbel(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for the given tokens at an absolute position.

    token_ids: int64 [n]. Returns float64 [n]. A token's noise does not depend on which other
    tokens are asked for.

    Example: `gumbel(7, 12, torch.tensor([5]))[0] == gumbel(7, 12, torch.arange(10))[5]`.
    """
    groups, inverse = torch.unique(token_ids >> 2, return_inverse=True)
    words = philox((groups, position, GUMBEL_STREAM, 0), seed)[inverse, token_ids & 3]
    return _to_gumbel(words)


def gumbel_all(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel noise of the whole vocabulary; the same values as `gumbel`. float64 [vocab]."""
    groups = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=device)
    return _to_gumbel(philox((groups, position, GUMBEL_STREAM, 0), seed).flatten()[:vocab_size])


def _to_gumbel(words: Tensor) -> Tensor:
    # 1 - uniform in (0, 1): log1p keeps full precision in the upper tail, which decides the argmax.
    uniform = (words.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


def coin(seed: int, position: int, index: int) -> float:
    """A uniform number in (0, 1) for the index-th accept decision at a position."""
    counter = torch.tensor([index], dtype=torch.int64)
    word = int(philox((counter, position, COIN_STREAM, 0), seed)[0, 0])
    return (word + 0.5) * 2.0**-32
