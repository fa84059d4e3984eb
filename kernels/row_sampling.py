"""RowSampling: how each row of a batch of logits is sampled, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of n rows; penalties, bias and bans are in the logits already.

    `seeds` int64 [n] are the 64 bits of the seed; `positions` int32 [n] the absolute position of
    the token to be chosen, which keys its noise; `inverse_temperature` fp32 [n], 0 = greedy, which
    ignores the others; `top_k` int32 [n], 0 = off; `top_p` fp32 [n], 1 = off; `min_p` fp32 [n],
    0 = off.
    """

    seeds: Tensor
    positions: Tensor
    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
