"""Gumbel argmax: the token of every row of logits, y = argmax(scaled + noise) over the survivors.

The same tokens as `Sampler.choose`, bit for bit: scaled = logit * inverse temperature in fp32, the
noise of `specdec.noise`, equal sums to the lowest token id.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.philox import gumbel, philox
from specdec.kernels.row_sampling import RowSampling
from specdec.kernels.variant import Variant

TILE = 1024  # tokens per program
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # unfused: see `philox`
_MAX_VOCAB = 1 << 20


@triton.jit
def _choose_in_tiles(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    inverse_temperatures: tl.tensor,
    thresholds: tl.tensor,
    tile_scores: tl.tensor,
    tile_ids: tl.tensor,
    tile_is_finite: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Program (row, tile): best score and its lowest token id, and whether all logits are finite.

    logits [n, vocab]; tile_scores fp32, tile_ids and tile_is_finite int32 [n, num_tiles].
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    token_ids = tile * TILE + tl.arange(0, TILE)
    is_token = token_ids < vocab_size
    logits += row.to(tl.int64) * row_stride
    x = tl.load(logits + token_ids, mask=is_token, other=0.0).to(tl.float32)
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=0)

    inverse_temperature = tl.load(inverse_temperatures + row)
    survives = is_token
    score = x
    if inverse_temperature != 0.0:
        scaled = x * inverse_temperature
        survives = survives & (scaled >= tl.load(thresholds + row))
        # Four neighbours share one Philox block: [TILE / 4] blocks, words laid side by side.
        group = (tile * (TILE // 4) + tl.arange(0, TILE // 4)).to(tl.uint32)
        word_0, word_1, word_2, word_3 = philox(
            group, tl.load(positions + row), tl.load(seeds + row)
        )
        even, odd = tl.interleave(word_0, word_2), tl.interleave(word_1, word_3)
        score = scaled + gumbel(tl.interleave(even, odd))
    # NaN is no survivor: it is not above any number.
    survives = survives & (score >= float("-inf"))
    score = tl.where(survives, score, float("-inf"))
    best, place = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tl.num_programs(1) + tile
    tl.store(tile_scores + out, best)
    tl.store(tile_ids + out, tile * TILE + place)
    tl.store(tile_is_finite + out, is_finite)


@triton.jit
def _choose_among_tiles(
    tile_scores: tl.tensor,
    tile_ids: tl.tensor,
    tile_is_finite: tl.tensor,
    num_tiles: tl.tensor,
    token_ids: tl.tensor,
    is_finite: tl.tensor,
    MAX_TILES: tl.constexpr,
) -> None:
    """Program (row): the first of the best tiles. token_ids, is_finite: int32 [n]."""
    row = tl.program_id(0)
    tiles = tl.arange(0, MAX_TILES)
    is_tile = tiles < num_tiles
    places = row * num_tiles + tiles
    scores = tl.load(tile_scores + places, mask=is_tile, other=float("-inf"))
    _, best = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(token_ids + row, tl.load(tile_ids + row * num_tiles + best))
    all_finite = tl.min(tl.load(tile_is_finite + places, mask=is_tile, other=1), axis=0)
    tl.store(is_finite + row, all_finite)


def gumbel_argmax(
    logits: Tensor, sampling: RowSampling, thresholds: Tensor
) -> tuple[Tensor, Tensor]:
    """The chosen token of each row, and whether the row's logits are all finite.

    logits: bf16, fp16 or fp32 [n, vocab], rows contiguous but at any stride; thresholds: fp32 [n],
    the least scaled value that survives (`truncation.thresholds`). Returns token_ids int32 [n],
    always below vocab, and is_finite int32 [n], 0 where a logit is infinite or NaN. Gumbel-max
    (Gumbel 1954) without a softmax: noise is computed where it is used and never stored. Greedy
    rows take the argmax of their logits and spend nothing on noise.

    Example: greedy rows need no more than `inverse_temperature` of zeros.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and 0 < vocab_size <= _MAX_VOCAB
    num_tiles = triton.cdiv(vocab_size, TILE)
    tiles, device = (num_rows, num_tiles), logits.device
    tile_scores = torch.empty(tiles, dtype=torch.float32, device=device)
    # Tensors of their own are aligned: Triton compiles anew for those that are not.
    tile_ids, tile_is_finite = (
        torch.empty(tiles, dtype=torch.int32, device=device) for _ in range(2)
    )
    token_ids, is_finite = (
        torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2)
    )
    if num_rows == 0:
        return token_ids, is_finite
    _choose_in_tiles[(num_rows, num_tiles)](
        logits,
        logits.stride(0),
        vocab_size,
        sampling.seeds,
        sampling.positions,
        sampling.inverse_temperature,
        thresholds,
        tile_scores,
        tile_ids,
        tile_is_finite,
        TILE=TILE,
        **_OPTIONS,
    )
    _choose_among_tiles[(num_rows,)](
        tile_scores,
        tile_ids,
        tile_is_finite,
        num_tiles,
        token_ids,
        is_finite,
        MAX_TILES=triton.next_power_of_2(num_tiles),
        num_warps=1,
    )
    return token_ids, is_finite


def variants() -> Iterator[Variant]:
    """The compiled forms: bf16 and fp32 logits."""
    for dtype in ("bf16", "fp32"):
        yield Variant(
            f"gumbel_argmax tiles {dtype}",
            _choose_in_tiles,
            {
                "logits": f"*{dtype}",
                "row_stride": "i32",
                "vocab_size": "i32",
                "seeds": "*i64",
                "positions": "*i32",
                "inverse_temperatures": "*fp32",
                "thresholds": "*fp32",
                "tile_scores": "*fp32",
                "tile_ids": "*i32",
                "tile_is_finite": "*i32",
            },
            {"TILE": TILE},
            _OPTIONS,
            multiples_of_16=("row_stride", "vocab_size"),
        )
    yield Variant(
        "gumbel_argmax rows",
        _choose_among_tiles,
        {
            "tile_scores": "*fp32",
            "tile_ids": "*i32",
            "tile_is_finite": "*i32",
            "num_tiles": "i32",
            "token_ids": "*i32",
            "is_finite": "*i32",
        },
        {"MAX_TILES": 256},
        {"num_warps": 1},
    )
