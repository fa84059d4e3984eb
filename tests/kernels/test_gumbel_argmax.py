"""Gumbel argmax: the noise has the bits of `specdec.noise`, the tokens are those of the Sampler."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec import noise
from specdec.kernels import gumbel_argmax as module
from specdec.kernels import philox
from specdec.kernels.gumbel_argmax import gumbel_argmax
from specdec.params import SamplingParams
from tests.kernels.device import DEVICE, randn
from tests.kernels.guard import guarded_results
from tests.kernels.sampled_rows import PARAMS, SampledRows, padded

INF, NAN = math.inf, math.nan
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _noise_of_words(words: tl.tensor, out: tl.tensor, size: tl.constexpr) -> None:
    places = tl.program_id(0) * size + tl.arange(0, size)
    word = tl.load(words + places).to(tl.uint32)
    tl.store(out + places, philox.gumbel(word))


@triton.jit
def _words(seed: tl.tensor, position: tl.tensor, out: tl.tensor, size: tl.constexpr) -> None:
    group = tl.arange(0, size)
    w0, w1, w2, w3 = philox.philox(group.to(tl.uint32), tl.load(position), tl.load(seed))
    tl.store(out + 4 * group + 0, w0.to(tl.int64))
    tl.store(out + 4 * group + 1, w1.to(tl.int64))
    tl.store(out + 4 * group + 2, w2.to(tl.int64))
    tl.store(out + 4 * group + 3, w3.to(tl.int64))


def test_noise_has_the_same_bits() -> None:
    """Ends, powers of two and the seams of the logarithms, and a lattice over all words."""
    seams = [round(2**32 * u) for u in (1 - 0.5**0.5, 0.5, 1 - math.exp(-1), 1 - 0.5**1.5)]
    parts = [torch.arange(seam - 4096, seam + 4096) for seam in seams]
    parts += [torch.arange(max(0, 2**bit - 512), 2**bit + 512) for bit in range(32)]
    parts += [torch.arange(4096), torch.arange(2**32 - 4096, 2**32)]
    parts += [torch.arange(0, 2**32, 16411)]
    words = torch.cat(parts)
    size = 1 << 16
    words = words[: len(words) // size * size]
    assert len(words) > 250_000
    out = torch.empty(len(words), dtype=torch.float32, device=DEVICE)
    _noise_of_words[(len(words) // size,)](
        words.to(DEVICE), out, size=size, num_warps=8, enable_fp_fusion=False
    )
    want = noise.gumbel_of_words(words)
    assert torch.equal(out.cpu().view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 + 5, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 131_071, 2**31 - 1])
def test_philox_has_the_same_words(seed: int, position: int) -> None:
    size = 256
    out = torch.empty(4 * size, dtype=torch.int64, device=DEVICE)
    seeds = torch.tensor([seed - 2**64 if seed >= 2**63 else seed], device=DEVICE)
    positions = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    _words[(1,)](seeds, positions, out, size=size)
    counter = (torch.arange(size), position, noise.GUMBEL_STREAM, 0)
    assert torch.equal(out.cpu(), noise.philox(counter, seed).flatten())


def check(rows: SampledRows) -> Tensor:
    """Equality with the Sampler, row by row; returns the tokens."""
    token_ids, is_finite = gumbel_argmax(padded(rows.logits), rows.sampling, rows.thresholds())
    want = [rows.sampler(i).choose(row, []) for i, row in enumerate(rows.logits.cpu())]
    assert token_ids.tolist() == want
    assert is_finite.tolist() == [1] * len(want)
    assert token_ids.dtype == is_finite.dtype == torch.int32
    return token_ids


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spread", [0.02, 4.0])
@pytest.mark.parametrize(
    ("vocab_size", "tile"), [(1, 1024), (3, 1024), (100, 1024), (1025, 1024), (8193, 4096)]
)
def test_equals_the_sampler(
    vocab_size: int,
    tile: int,
    spread: float,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TILE", tile)  # a parameter of speed; the interpreter likes few
    logits = (spread * randn(len(PARAMS), vocab_size, seed=vocab_size)).to(dtype)
    check(SampledRows(logits, PARAMS))


@pytest.mark.parametrize("vocab_size", [49152, 151_936])
def test_equals_the_sampler_on_whole_vocabularies(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TILE", 16384)
    params = [PARAMS[0], PARAMS[6], SamplingParams(temperature=2.0)]
    check(SampledRows((3 * randn(3, vocab_size, seed=1)).bfloat16(), params))


def test_equal_logits_are_told_apart_by_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few values, as bf16 gives near a row's top: ties in the logits, not in the sums."""
    monkeypatch.setattr(module, "TILE", 512)
    logits = (2 * randn(len(PARAMS), 1500, seed=3)).round()
    tokens = check(SampledRows(logits, PARAMS))
    assert len(tokens.unique()) > 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("places", [[5, 6], [1023, 1024], [700, 1300, 2999], [2047, 2050]])
def test_the_lowest_token_wins_a_tie(
    places: list[int], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one tile and across tiles; at this size a sum has no room for the noise."""
    monkeypatch.setattr(module, "TILE", 1024)
    logits = randn(2, 3000, seed=4)
    logits[:, places] = 2.0**30
    params = [SamplingParams(temperature=temperature, top_k=top_k) for top_k in (0, 5)]
    assert check(SampledRows(logits, params)).tolist() == [places[0]] * 2


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 3, 1023, 1024, 1499])
def test_rows_that_are_not_finite_are_flagged(value: float, place: int) -> None:
    """And give a token of the vocabulary all the same, as does a row of nothing else."""
    logits = randn(6, 1500, seed=5)
    logits[[1, 3], place] = value
    logits[5] = value
    params = [SamplingParams(temperature=t) for t in (0.0, 0.0, 1.0, 1.0, 1.0, 1.0)]
    rows = SampledRows(logits, params)
    off = torch.full((6,), -INF, device=DEVICE)
    token_ids, is_finite = gumbel_argmax(padded(logits), rows.sampling, off)
    assert is_finite.tolist() == [1, 0, 1, 0, 1, 0]
    assert all(0 <= token < 1500 for token in token_ids.tolist())
    for row in (0, 2, 4):
        assert int(token_ids[row]) == rows.sampler(row).choose(logits[row].cpu(), [])


def test_nothing_else_is_written() -> None:
    rows = SampledRows(randn(len(PARAMS), 70, seed=6), PARAMS)
    with guarded_results(module):
        check(rows)


def test_no_rows() -> None:
    rows = SampledRows(torch.empty(0, 50, device=DEVICE), [])
    token_ids, is_finite = gumbel_argmax(rows.logits, rows.sampling, torch.empty(0, device=DEVICE))
    assert token_ids.shape == is_finite.shape == (0,)


PTX = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdec.kernels import gumbel_argmax, truncation

for variant in [next(gumbel_argmax.variants()), next(truncation.variants())]:
    names = variant.kernel.arg_names
    types = {name: variant.signature.get(name, "constexpr") for name in names}
    source = ASTSource(variant.kernel, types, dict(variant.constants))
    for fusion in (variant.options.get("enable_fp_fusion", True), True):
        options = {**variant.options, "enable_fp_fusion": fusion}
        print("@", variant.name.replace(" ", "_"), fusion)
        print(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


def test_no_compiled_noise_fuses_a_multiplication_with_an_addition() -> None:
    """A fused one rounds once where `specdec.noise` rounds twice. With fusion there would be."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", PTX]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    fused, divisions = {}, {}
    for text in done.stdout.split("@ ")[1:]:
        name, fusion = text.split(maxsplit=2)[:2]
        fused[name, fusion] = len(re.findall(r"\bfma\.", text))
        divisions[name] = len(re.findall(r"\bdiv\.rn\.f32", text))
        assert not re.search(r"\bdiv\.(full|approx)|\.ftz\.f32", text)
    argmax, truncation = "gumbel_argmax_tiles_bf16", "truncation_bf16"
    assert fused[argmax, "False"] == fused[truncation, "False"] == 0
    assert fused[argmax, "True"] > 50 and fused[truncation, "True"] > 0
    assert divisions[argmax] >= 2 and divisions[truncation] == 1  # the latter for min_p
