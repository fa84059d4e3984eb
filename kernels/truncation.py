"""Truncation: the threshold of every row, the one number that says which of its tokens survive.

The rule of `Sampler.threshold`: top-k keeps values not below the k-th largest; top-p, over what is
left, values above which there is less than top_p of the mass; min-p values not below
max + log(min_p). Ties at a threshold are kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.philox import negative_log
from specdec.kernels.row_sampling import RowSampling
from specdec.kernels.variant import Variant

TILE = 1024  # tokens per step of a pass
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # unfused: see `philox`


@triton.jit
def _image(x: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """uint32 numbers in the order of the logits, from the BITS that a logit has."""
    if BITS == 32:
        bits = x.to(tl.uint32, bitcast=True)
    else:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
    sign = 1 << (BITS - 1)
    is_negative = (bits & sign) != 0
    return tl.where(is_negative, bits ^ (2 * sign - 1), bits ^ sign)


@triton.jit
def _value(image: tl.tensor, like: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The logit of a scalar image, fp32; `like` has the logits' type."""
    sign = 1 << (BITS - 1)
    bits = tl.where((image & sign) != 0, image ^ sign, image ^ (2 * sign - 1))
    if BITS == 16:
        bits = bits.to(tl.uint16)
    return bits.to(like.dtype, bitcast=True).to(tl.float32)


@triton.jit
def _search(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    inverse_temperature: tl.tensor,
    largest: tl.tensor,
    least: tl.tensor,
    target: tl.tensor,
    IS_COUNT: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The scaled value v, the largest for which the weight of tokens not below v reaches `target`.

    Weights are 1 (IS_COUNT) or exp(scaled - largest), 0 below `least`; `target` is a count, or a
    fraction of all weight. Four bits of the value's image are settled by a pass, from the
    weights above each of 16 candidates. Sums are monotone in the candidate, for their order is
    fixed and rounding is monotone; counts are exact.
    """
    candidates = tl.arange(0, 16).to(tl.uint32)
    lanes = tl.arange(0, TILE)
    found = tl.zeros((), tl.uint32)
    target = target.to(tl.float64)
    unit = tl.full((), 1 << (BITS - 4), tl.uint32)
    for num_settled in range(0, BITS, 4):
        bounds = found + candidates * unit
        weights = tl.zeros((TILE, 16), tl.float32)
        for start in range(0, vocab_size, TILE):
            is_token = start + lanes < vocab_size
            x = tl.load(logits + start + lanes, mask=is_token, other=float("-inf"))
            scaled = x.to(tl.float32) * inverse_temperature
            if IS_COUNT:
                weight = tl.where(is_token & (scaled >= least), 1.0, 0.0)
            else:
                weight = tl.where(scaled >= least, tl.exp(scaled - largest), 0.0)
            is_above = _image(x, BITS)[:, None] >= bounds[None, :]
            weights += tl.where(is_above, weight[:, None], 0.0)
        sums = tl.sum(weights.to(tl.float64), axis=0)
        if not IS_COUNT:  # the first sums hold that of a candidate below all values
            target = target * tl.where(num_settled == 0, tl.max(sums, axis=0), 1.0)
        num_reached = tl.sum((sums >= target).to(tl.int32), axis=0)
        found += tl.maximum(num_reached - 1, 0).to(tl.uint32) * unit
        unit = unit >> 4
    return _value(found, tl.load(logits), BITS) * inverse_temperature


@triton.jit
def _find_thresholds(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    inverse_temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    thresholds: tl.tensor,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program (row). logits [n, vocab]; thresholds: fp32 [n]."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    inverse_temperature = tl.load(inverse_temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    is_sampled = inverse_temperature != 0.0
    has_top_k = is_sampled & (top_k > 0) & (top_k < vocab_size)
    has_top_p = is_sampled & (top_p < 1.0)
    has_min_p = is_sampled & (min_p >= 1.1754943508222875e-38)  # fp32's least normal number
    threshold = tl.full((), float("-inf"), tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    if has_top_p | has_min_p:
        lanes = tl.arange(0, TILE)
        most = tl.full((TILE,), float("-inf"), tl.float32)
        for start in range(0, vocab_size, TILE):
            is_token = start + lanes < vocab_size
            x = tl.load(logits + start + lanes, mask=is_token, other=float("-inf"))
            most = tl.maximum(most, x.to(tl.float32))
        largest = tl.max(most, axis=0) * inverse_temperature
        is_bounded = tl.abs(largest) < float("inf")  # else there is no mass to speak of
        has_top_p = has_top_p & is_bounded
        has_min_p = has_min_p & is_bounded
    if has_top_k:
        threshold = _search(
            logits,
            vocab_size,
            inverse_temperature,
            largest,
            threshold,
            top_k.to(tl.float32),
            IS_COUNT=True,
            BITS=BITS,
            TILE=TILE,
        )
    if has_top_p:
        threshold = _search(
            logits,
            vocab_size,
            inverse_temperature,
            largest,
            threshold,
            top_p,
            IS_COUNT=False,
            BITS=BITS,
            TILE=TILE,
        )
    if has_min_p:
        threshold = tl.maximum(threshold, largest - negative_log(min_p))
    tl.store(thresholds + row, threshold)


def thresholds(logits: Tensor, sampling: RowSampling) -> Tensor:
    """The least scaled value that survives in each row, -inf where nothing is cut. fp32 [n].

    logits: bf16, fp16 or fp32 [n, vocab], rows contiguous but at any stride. Scaled values are
    logit * inverse temperature in fp32. The same number as `Sampler.threshold`; for top-p as long
    as the mass is not within rounding, about 1e-7, of top_p. Of a row that is not finite it is any
    number.

    One program per row reads its logits once for the maximum (top-p, min-p) and then, without a
    sort, once per four bits of a logit: 4 passes for top-k and 4 for top-p in 16 bits, 8 and 8 in
    fp32. Rows that cut nothing, greedy ones too, are not read.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and 0 < vocab_size < 1 << 24  # counts are exact in fp32
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _find_thresholds[(num_rows,)](
            logits,
            logits.stride(0),
            vocab_size,
            sampling.inverse_temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            out,
            BITS=8 * logits.element_size(),
            TILE=TILE,
            **_OPTIONS,
        )
    return out


def variants() -> Iterator[Variant]:
    """The compiled forms: bf16 and fp32 logits."""
    for dtype, bits in (("bf16", 16), ("fp32", 32)):
        yield Variant(
            f"truncation {dtype}",
            _find_thresholds,
            {
                "logits": f"*{dtype}",
                "row_stride": "i32",
                "vocab_size": "i32",
                "inverse_temperatures": "*fp32",
                "top_ks": "*i32",
                "top_ps": "*fp32",
                "min_ps": "*fp32",
                "thresholds": "*fp32",
            },
            {"BITS": bits, "TILE": TILE},
            _OPTIONS,
            multiples_of_16=("row_stride", "vocab_size"),
        )
