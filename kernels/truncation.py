"""Truncation: the threshold of every row, the one number that says which of its tokens survive.

The rule of `Sampler.threshold`: top-k keeps values not below the k-th largest; top-p, over what is
left, values above which there is less than top_p of the mass; min-p values not below
max + log(min_p). Ties at a threshold are kept.

A search settles four bits of the wanted value's image by a pass, from the sums above each of 16
bounds. A pass is one launch over (rows, tiles); it begins with what the pass before it left.
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

TILE = 4096  # tokens per program: 32 programs for a row of 128k
LANES = 1024  # tokens that a program works on at once
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
def _value(image: tl.tensor, logits: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The logit of a scalar image, fp32; `logits` points to the type that it has."""
    sign = 1 << (BITS - 1)
    bits = tl.where((image & sign) != 0, image ^ sign, image ^ (2 * sign - 1))
    if BITS == 16:
        bits = bits.to(tl.uint16)
    return bits.to(logits.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def _settle(
    tile_sums: tl.tensor,
    bases: tl.tensor,
    place: tl.tensor,
    num_tiles: tl.tensor,
    target: tl.tensor,
    shift: tl.tensor,
    MAX_TILES: tl.constexpr,
) -> tl.tensor:
    """The image after the pass of a row at place = pass * n + row: its base and one digit more.

    The digit, at bit `shift`, is that of the last bound whose sum reaches `target`.
    """
    tiles = tl.arange(0, MAX_TILES)[:, None]
    sums = tile_sums + (place * num_tiles + tiles) * 16 + tl.arange(0, 16)[None, :]
    sums = tl.sum(tl.load(sums, mask=tiles < num_tiles, other=0.0).to(tl.float64), axis=0)
    num_reached = tl.sum((sums >= target).to(tl.int32), axis=0)
    digit = tl.maximum(num_reached - 1, 0).to(tl.uint32)
    return tl.load(bases + place).to(tl.uint32) + (digit << shift)


@triton.jit
def _total(
    tile_sums: tl.tensor, place: tl.tensor, num_tiles: tl.tensor, MAX_TILES: tl.constexpr
) -> tl.tensor:
    """All mass of a row, fp64: in its first pass over masses the lowest bound is below all."""
    tiles = tl.arange(0, MAX_TILES)
    sums = tile_sums + (place * num_tiles + tiles) * 16
    return tl.sum(tl.load(sums, mask=tiles < num_tiles, other=0.0).to(tl.float64), axis=0)


@triton.jit
def _largest(
    tile_maxima: tl.tensor, row: tl.tensor, num_tiles: tl.tensor, MAX_TILES: tl.constexpr
) -> tl.tensor:
    """The largest logit of a row, fp32."""
    tiles = tl.arange(0, MAX_TILES)
    maxima = tile_maxima + row * num_tiles + tiles
    return tl.max(tl.load(maxima, mask=tiles < num_tiles, other=float("-inf")), axis=0)


@triton.jit
def _tile_sums(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    tile: tl.tensor,
    inverse_temperature: tl.tensor,
    largest: tl.tensor,
    least: tl.tensor,
    bounds: tl.tensor,
    IS_MASS: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:
    """The weights of a tile's tokens whose image is not below each bound, fp32 [16].

    Weights are 1, or exp(scaled - largest) if IS_MASS, 0 below `least`. Sums are monotone in the
    bound, for their order is fixed and rounding is monotone; counts are exact.
    """
    weights = tl.full((16, LANES), 0.0, tl.float32)
    for start in tl.static_range(0, TILE, LANES):
        token_ids = tile * TILE + start + tl.arange(0, LANES)
        is_token = token_ids < vocab_size
        x = tl.load(logits + token_ids, mask=is_token, other=float("-inf"))
        scaled = x.to(tl.float32) * inverse_temperature
        if IS_MASS:
            weight = tl.where(scaled >= least, tl.exp(scaled - largest), 0.0)
        else:
            weight = tl.where(is_token & (scaled >= least), 1.0, 0.0)
        is_above = _image(x, BITS)[None, :] >= bounds[:, None]
        weights += tl.where(is_above, weight[None, :], 0.0)
    return tl.sum(weights, axis=1)


@triton.jit(do_not_specialize=("digit",))
def _sum_in_tiles(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    inverse_temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    tile_maxima: tl.tensor,
    tile_sums: tl.tensor,
    bases: tl.tensor,
    thresholds: tl.tensor,
    digit: tl.tensor,
    IS_MASS: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    MAX_TILES: tl.constexpr,
) -> None:
    """Program (row, tile): counts for a digit of top-k, or masses for one of top-p (IS_MASS).

    logits [n, vocab]; tile_maxima: fp32 [n, num_tiles], written for digit 0 of top-k; tile_sums:
    fp32 [passes, n, num_tiles, 16]; bases: int32 [passes, n], the lowest of the bounds;
    thresholds: fp32 [n], those of top-k, written for digit 0 of top-p. Passes are the digits of
    top-k, then those of top-p. Every program of a row settles the same digit, the first stores it.
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    num_rows = tl.num_programs(0)
    num_tiles = tl.num_programs(1)
    num_digits: tl.constexpr = BITS // 4
    logits += row.to(tl.int64) * row_stride
    inverse_temperature = tl.load(inverse_temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    is_sampled = inverse_temperature != 0.0
    has_top_k = is_sampled & (top_k > 0) & (top_k < vocab_size)
    has_top_p = is_sampled & (top_p < 1.0)
    largest = tl.full((), float("-inf"), tl.float32)
    least = tl.full((), float("-inf"), tl.float32)
    base = tl.full((), 0, tl.uint32)
    count = top_k.to(tl.float64)
    shift = BITS - 4 - 4 * digit
    place = digit * num_rows + row
    if IS_MASS:
        place += num_digits * num_rows
    before = place - num_rows
    if IS_MASS:
        if digit == 0:
            if has_top_k:
                image = _settle(tile_sums, bases, before, num_tiles, count, 0, MAX_TILES)
                least = _value(image, logits, BITS) * inverse_temperature
            if tile == 0:
                tl.store(thresholds + row, least)
        if not has_top_p:
            return
        largest = _largest(tile_maxima, row, num_tiles, MAX_TILES) * inverse_temperature
        if not (tl.abs(largest) < float("inf")):  # there is no mass to speak of
            return
        if digit > 0:
            least = tl.load(thresholds + row)
            first = num_digits * num_rows + row
            mass = top_p.to(tl.float64) * _total(tile_sums, first, num_tiles, MAX_TILES)
            base = _settle(tile_sums, bases, before, num_tiles, mass, shift + 4, MAX_TILES)
    else:
        # fp32's least normal number: min_p below it cuts nothing.
        has_min_p = is_sampled & (tl.load(min_ps + row) >= 1.1754943508222875e-38)
        if (digit == 0) & (has_top_p | has_min_p):
            token_ids = tile * TILE + tl.arange(0, TILE)
            x = tl.load(logits + token_ids, mask=token_ids < vocab_size, other=float("-inf"))
            x = tl.maximum(x.to(tl.float32), float("-inf"))  # no NaN
            tl.store(tile_maxima + row * num_tiles + tile, tl.max(x, axis=0))
        if not has_top_k:
            return
        if digit > 0:
            base = _settle(tile_sums, bases, before, num_tiles, count, shift + 4, MAX_TILES)
    if tile == 0:
        tl.store(bases + place, base.to(tl.int32))
    candidates = tl.arange(0, 16)
    sums = _tile_sums(
        logits,
        vocab_size,
        tile,
        inverse_temperature,
        largest,
        least,
        base + (candidates.to(tl.uint32) << shift),
        IS_MASS=IS_MASS,
        BITS=BITS,
        TILE=TILE,
        LANES=LANES,
    )
    tl.store(tile_sums + (place * num_tiles + tile) * 16 + candidates, sums)


@triton.jit
def _conclude(
    logits: tl.tensor,
    inverse_temperatures: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    tile_maxima: tl.tensor,
    tile_sums: tl.tensor,
    bases: tl.tensor,
    num_tiles: tl.tensor,
    thresholds: tl.tensor,
    BITS: tl.constexpr,
    MAX_TILES: tl.constexpr,
) -> None:
    """Program (row): the last digit of top-p, and min-p. The rest as in `_sum_in_tiles`."""
    row = tl.program_id(0)
    num_rows = tl.num_programs(0)
    num_digits: tl.constexpr = BITS // 4
    inverse_temperature = tl.load(inverse_temperatures + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    has_top_p = top_p < 1.0
    has_min_p = min_p >= 1.1754943508222875e-38  # as in `_sum_in_tiles`
    if (inverse_temperature == 0.0) | (not (has_top_p | has_min_p)):
        return
    largest = _largest(tile_maxima, row, num_tiles, MAX_TILES) * inverse_temperature
    if not (tl.abs(largest) < float("inf")):
        return
    threshold = tl.load(thresholds + row)
    if has_top_p:
        first = num_digits * num_rows + row
        last = (2 * num_digits - 1) * num_rows + row
        mass = top_p.to(tl.float64) * _total(tile_sums, first, num_tiles, MAX_TILES)
        image = _settle(tile_sums, bases, last, num_tiles, mass, 0, MAX_TILES)
        threshold = _value(image, logits, BITS) * inverse_temperature
    if has_min_p:
        threshold = tl.maximum(threshold, largest - negative_log(min_p))
    tl.store(thresholds + row, threshold)


def thresholds(logits: Tensor, sampling: RowSampling) -> Tensor:
    """The least scaled value that survives in each row, -inf where nothing is cut. fp32 [n].

    logits: bf16, fp16 or fp32 [n, vocab], rows contiguous but at any stride. Scaled values are
    logit * inverse temperature in fp32. The same number as `Sampler.threshold`; for top-p as long
    as the mass is not within rounding, about 1e-7, of top_p. Of a row that is not finite it is any
    number.

    No sort and no atomics: one pass over the logits per four bits of a logit, 4 for top-k and 4
    for top-p in 16 bits, 8 and 8 in fp32. Each is one launch of (rows, tiles), the first also finds
    the maximum for top-p and min-p, and one more launch concludes: 9 launches in 16 bits, 17 in
    fp32, whatever the rows ask for. A row's logits are read from memory by its first pass and from
    L2 by the others, as far as they fit there; a pass moves 64 bytes of sums per tile as well.
    A row is read only by the passes that it needs; rows that cut nothing, greedy ones too, are not
    read. Sums are added in an order that the tiles alone decide, so rows do not depend on others.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and 0 < vocab_size < 1 << 24  # counts are exact in fp32
    bits, device = 8 * logits.element_size(), logits.device
    num_digits, num_tiles = bits // 4, triton.cdiv(vocab_size, TILE)
    max_tiles = triton.next_power_of_2(num_tiles)
    out = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows == 0:
        return out
    bases = torch.empty((2 * num_digits, num_rows), dtype=torch.int32, device=device)
    maxima = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=device)
    sums = torch.empty(
        (2 * num_digits, num_rows, num_tiles, 16), dtype=torch.float32, device=device
    )
    for is_mass in (False, True):
        for digit in range(num_digits):
            _sum_in_tiles[(num_rows, num_tiles)](
                logits,
                logits.stride(0),
                vocab_size,
                sampling.inverse_temperature,
                sampling.top_k,
                sampling.top_p,
                sampling.min_p,
                maxima,
                sums,
                bases,
                out,
                digit,
                IS_MASS=is_mass,
                BITS=bits,
                TILE=TILE,
                LANES=min(TILE, LANES),
                MAX_TILES=max_tiles,
                **_OPTIONS,
            )
    _conclude[(num_rows,)](
        logits,
        sampling.inverse_temperature,
        sampling.top_p,
        sampling.min_p,
        maxima,
        sums,
        bases,
        num_tiles,
        out,
        BITS=bits,
        MAX_TILES=max_tiles,
        **_OPTIONS,
    )
    return out


def variants() -> Iterator[Variant]:
    """The compiled forms: bf16 and fp32 logits, up to 64 tiles."""
    parameters = {"inverse_temperatures": "*fp32", "top_ps": "*fp32", "min_ps": "*fp32"}
    buffers = {"tile_maxima": "*fp32", "tile_sums": "*fp32", "bases": "*i32"}
    for dtype, bits in (("bf16", 16), ("fp32", 32)):
        common = {"logits": f"*{dtype}", **parameters, **buffers, "thresholds": "*fp32"}
        constants = {"BITS": bits, "MAX_TILES": 64}
        yield Variant(
            f"truncation {dtype}", _conclude, {**common, "num_tiles": "i32"}, constants, _OPTIONS
        )
        integers = {"row_stride": "i32", "vocab_size": "i32", "top_ks": "*i32", "digit": "i32"}
        for name, is_mass in (("top-k", False), ("top-p", True)):
            yield Variant(
                f"truncation {name} {dtype}",
                _sum_in_tiles,
                {**common, **integers},
                {**constants, "IS_MASS": is_mass, "TILE": TILE, "LANES": LANES},
                _OPTIONS,
                multiples_of_16=("row_stride", "vocab_size"),
            )
