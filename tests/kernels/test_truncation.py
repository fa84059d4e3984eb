"""Thresholds on the device against those of the Sampler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels import truncation as module
from specdec.kernels.truncation import thresholds
from specdec.params import SamplingParams
from tests.kernels.device import DEVICE, randn
from tests.kernels.guard import guarded_results
from tests.kernels.sampled_rows import PARAMS, SampledRows, padded

INF = math.inf
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MASS_ERROR = 1e-6  # of fp32 exponentials, summed in another order

# Each way of cutting alone, at its ends and with the others.
MIX = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in (
        (1.0, 1, 1.0, 0.0),
        (0.7, 7, 1.0, 0.0),
        (1.3, 60, 1.0, 0.0),
        (1.0, 100_000, 1.0, 0.0),
        (1.3, 0, 0.9, 0.0),
        (1.0, 0, 0.3, 0.0),
        (0.7, 0, 1e-9, 0.0),
        (100.0, 0, 0.999, 0.0),
        (1e-5, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.02),
        (1.3, 0, 1.0, 1.0),
        (0.7, 60, 0.9, 0.0),
        (1.3, 7, 0.6, 0.02),
        (1.0, 0, 0.99, 0.5),
    )
]


# The same for few rows of many tiles.
FEW = [
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=4, top_p=0.9, min_p=0.02),
]


@pytest.fixture(autouse=True)
def tiles_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in small rows; the size is a parameter of speed."""
    monkeypatch.setattr(module, "TILE", 64)


def check(rows: SampledRows) -> list[float]:
    """Equal thresholds, or a top-p that is decided within rounding. Returns them."""
    got = thresholds(padded(rows.logits), rows.sampling)
    assert got.dtype == torch.float32
    for i, (value, want) in enumerate(zip(got.tolist(), rows.thresholds().tolist(), strict=True)):
        if value != want:
            params = rows.params[i]
            assert params.top_p < 1.0, (params, value, want)
            check_border(rows.logits[i].cpu(), params, value, want)
    return got.tolist()


def check_border(logits: Tensor, params: SamplingParams, value: float, want: float) -> None:
    """The values that only one side keeps have a mass above them that is top_p but for rounding."""
    scaled = logits.float() * torch.tensor(1 / params.temperature, dtype=torch.float32)
    kept = scaled
    if params.top_k:
        kept = scaled[scaled >= scaled.topk(params.top_k).values[-1]]
    mass = kept.double().softmax(0)
    low, high = sorted((value, want))
    disputed = kept[(kept >= low) & (kept < high)].unique()
    assert len(disputed)
    for number in disputed:
        assert abs(float(mass[kept > number].sum()) - params.top_p) < MASS_ERROR


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("vocab_size", "spread"), [(1, 4.0), (64, 0.02), (100, 4.0)])
def test_equals_the_sampler(vocab_size: int, spread: float, dtype: torch.dtype) -> None:
    """Any mix of parameters, top_k above the vocabulary's size among them."""
    logits = (spread * randn(len(MIX), vocab_size, seed=vocab_size) - 1).to(dtype)
    check(SampledRows(logits, MIX))


@pytest.mark.parametrize(
    ("vocab_size", "tile", "dtype", "spread"),
    [
        (8193, 4096, torch.float16, 0.5),
        (8193, 8192, torch.float32, 0.5),
        (49152, 16384, torch.bfloat16, 4.0),
    ],
)
def test_equals_the_sampler_on_larger_vocabularies(
    vocab_size: int, tile: int, dtype: torch.dtype, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TILE", tile)
    logits = (spread * randn(len(PARAMS), vocab_size, seed=2)).to(dtype)
    check(SampledRows(logits, PARAMS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_sampler_on_the_largest(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TILE", 32768)
    monkeypatch.setattr(module, "LANES", 8192)
    params = [
        SamplingParams(temperature=0.8, top_k=60_000, top_p=0.999),
        SamplingParams(temperature=1.0, top_p=0.95, min_p=1e-4),
    ]
    check(SampledRows((2 * randn(2, 151_936, seed=3)).to(dtype), params))


@pytest.mark.parametrize("rest", [-9.0, -INF])
def test_survivors_of_one_tile(rest: float) -> None:
    """In the first of four tiles, in one between, in the tail; of other tiles none survives."""
    params = FEW * 3
    logits = torch.full((len(params), 3 * 64 + 5), rest, dtype=torch.float16, device=DEVICE)
    for row in range(len(params)):
        start = (0, 100, 3 * 64)[row // 3]
        logits[row, start : start + 5] = randn(5, seed=row)
    got = check(SampledRows(logits, params))
    assert all(value > -9.0 for value in got)


@pytest.mark.parametrize("value", [1.5, -1.5, 0.0])
def test_ties_across_tiles(value: float) -> None:
    """The thresholds' value lies in each of four tiles, above it one token of the second."""
    logits = randn(len(FEW), 3 * 64 + 5, seed=4, dtype=torch.float16) - 12
    logits[:, [0, 63, 64, 150, 191, 196]] = value
    logits[:, 70] = value + 0.25
    got = check(SampledRows(logits, FEW))
    scaled = [value * torch.tensor(1 / each.temperature).item() for each in FEW]
    assert got == pytest.approx(scaled)


def test_a_row_is_its_own_business() -> None:
    """Its neighbours and its place among them change nothing, to the last bit."""
    params = FEW * 2
    logits = 0.5 * randn(len(params), 150, seed=5, dtype=torch.float16)
    together = check(SampledRows(logits, params))
    backwards = check(SampledRows(logits.flip(0), params[::-1]))
    assert backwards[::-1] == together
    for row in (1, 2, 5):
        assert check(SampledRows(logits[row : row + 1], params[row : row + 1])) == [together[row]]


@pytest.mark.parametrize("values", [1, 5])
def test_massive_ties(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of few values: each is kept or cut as a whole."""
    monkeypatch.setattr(module, "TILE", 1024)
    logits = ((randn(len(MIX), 3000, seed=values) * 10).round() % values / 2).half()
    got = check(SampledRows(logits, MIX))
    cutting = [value for value in got if value > -INF]
    assert len(cutting) > len(got) / 2


def test_top_k_counts_scaled_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours in fp32 that are one value after scaling, and the two zeros, are ties."""
    monkeypatch.setattr(module, "TILE", 128)
    numbers = 1.9 + torch.arange(100) * 2.0**-23
    zeros = torch.tensor([0.0, -0.0] * 50)
    params = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        for temperature in (1.75, 3.0)
        for top_k, top_p in ((1, 1.0), (3, 1.0), (50, 1.0), (99, 0.5))
    ]
    for row in (numbers, -numbers, zeros):
        shuffled = row[torch.randperm(100, generator=torch.Generator().manual_seed(1))]
        logits = shuffled.expand(len(params), -1).contiguous().to(DEVICE)
        scaled = numbers * torch.tensor(1 / 1.75, dtype=torch.float32)
        assert len(scaled.unique()) < 70
        check(SampledRows(logits, params))


def test_banned_tokens_are_below_every_threshold() -> None:
    logits = randn(len(MIX), 200, seed=7, dtype=torch.float16)
    logits[:, 3:] = -INF
    got = check(SampledRows(logits, MIX))
    for value, params in zip(got, MIX, strict=True):
        if params.top_k >= 7 and params.top_p == 1.0 and params.min_p == 0.0:
            assert value == -INF


def literal(row: Sequence[float], top_k: int, top_p: float, min_p: float) -> float:
    """The rule once more, for a row of plain numbers at temperature 1."""
    kept = [x for x in row if not top_k or x >= sorted(row)[-top_k]]
    total = math.fsum(math.exp(x) for x in kept)
    kept = [x for x in kept if math.fsum(math.exp(y) for y in kept if y > x) < top_p * total]
    return min(x for x in kept if not min_p or x >= max(row) + math.log(min_p))


def test_by_the_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", 4)
    row = [0.5, -1.0, 2.0, 2.0, 1.25, -3.0, 0.5, 0.0]
    mixes = list(itertools.product((0, 2, 4), (1.0, 0.85, 0.6), (0.0, 0.07)))
    params = [SamplingParams(temperature=1.0, top_k=k, top_p=p, min_p=m) for k, p, m in mixes]
    logits = torch.tensor(row, device=DEVICE).half().expand(len(mixes), -1).contiguous()
    got = check(SampledRows(logits, params))
    for value, mix in zip(got, mixes, strict=True):
        survivors = [x for x in row if x >= value]
        assert survivors == [x for x in row if x >= literal(row, *mix)]


def test_min_p_has_the_bits_of_the_sampler() -> None:
    """Also its logarithm, which libraries round in different ways."""
    values = torch.rand(80, generator=torch.Generator().manual_seed(6)).tolist()
    params = [
        SamplingParams(temperature=1.0, min_p=value) for value in [1e-40, 1e-30, 1.0, *values]
    ]
    logits = torch.tensor([0.0, -1.0], device=DEVICE).half().expand(len(params), -1).contiguous()
    got = check(SampledRows(logits, params))
    assert got[0] == -INF  # not a normal number in fp32, which some devices take for 0
    assert got[1:] == pytest.approx([math.log(each.min_p) for each in params[1:]], abs=1e-6)


def test_rows_that_cut_nothing_are_not_read() -> None:
    """Where they are read, NaN gives something else."""
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5),
        SamplingParams(temperature=1.0, top_k=500),
        SamplingParams(temperature=1.0, min_p=1e-300),
        SamplingParams(temperature=1.0, top_k=499, top_p=0.5),
    ]
    logits = torch.full((5, 500), math.nan, device=DEVICE)
    got = thresholds(logits, SampledRows(logits, params).sampling).tolist()
    assert got[:4] == [-INF] * 4
    assert got[4] != -INF


@pytest.mark.parametrize("value", [math.nan, INF])
def test_rows_that_are_not_finite_do_not_disturb_others(value: float) -> None:
    rows = SampledRows(randn(len(MIX), 100, seed=8, dtype=torch.float16), MIX)
    want = check(rows)
    logits = rows.logits.clone()
    logits[::2, 50] = value
    logits[::4] = value
    got = thresholds(logits, rows.sampling).tolist()
    assert got[1::2] == want[1::2]


def test_nothing_else_is_written() -> None:
    """These rows need every pass, so that also all that passes leave to each other is written."""
    params = FEW[2:] * 3
    with guarded_results(module):
        check(SampledRows(randn(len(params), 150, seed=9), params))


def test_what_was_in_memory_before_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    params = MIX[::2]
    rows = SampledRows(randn(len(params), 100, seed=10, dtype=torch.float16), params)
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        tensor = empty(*shape, **options)
        return tensor.fill_(math.nan if tensor.is_floating_point() else -1)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        got = thresholds(rows.logits, rows.sampling)
    assert got.tolist() == check(rows)


def test_no_rows() -> None:
    rows = SampledRows(torch.empty(0, 50, device=DEVICE), [])
    assert thresholds(rows.logits, rows.sampling).shape == (0,)
