"""The noise is Philox4x32-10, the same for any subset of tokens, and Gumbel distributed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from specdec.noise import (
    coin,
    gumbel,
    gumbel_all,
    gumbel_at,
    gumbel_of_words,
    negative_log,
    philox,
)

CPU = torch.device("cpu")
ONES = 0xFFFFFFFF
seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**20)


# Known answers of Random123's kat_vectors, philox 4x32 with 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: str
) -> None:
    first = torch.tensor([counter[0], 12345, counter[0]])
    got = philox((first, *counter[1:]), key[0] | key[1] << 32)
    for row in (0, 2):  # lanes do not touch each other
        assert " ".join(f"{word:08x}" for word in got[row].tolist()) == words
    assert not torch.equal(got[1], got[0])


@given(
    seed=seeds,
    position=positions,
    vocab_size=st.integers(1, 70),
    data=st.data(),
)
def test_any_subset_has_the_bits_of_the_whole(
    seed: int, position: int, vocab_size: int, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=20))
    whole = gumbel_all(seed, position, vocab_size, CPU)
    assert whole.shape == (vocab_size,) and whole.dtype == torch.float32
    assert torch.equal(gumbel(seed, position, torch.tensor(ids)), whole[ids])


@settings(deadline=None)
@given(
    seed=st.one_of(st.sampled_from([0, 2**64 - 1]), seeds),
    rows=st.lists(
        st.tuples(positions, st.lists(st.integers(0, 200_000), min_size=5, max_size=5)), max_size=6
    ),
)
def test_several_positions_at_once_have_the_bits_of_each(
    seed: int, rows: list[tuple[int, list[int]]]
) -> None:
    places = torch.tensor([position for position, _ in rows], dtype=torch.int64)
    ids = torch.tensor([own for _, own in rows], dtype=torch.int64).view(-1, 5)
    got = gumbel_at(seed, places, ids)
    assert got.shape == ids.shape and got.dtype == torch.float32
    for (position, own), noise in zip(rows, got, strict=True):
        assert torch.equal(noise, gumbel(seed, position, torch.tensor(own)))


def test_a_larger_vocabulary_keeps_the_noise_of_the_smaller() -> None:
    small, large = gumbel_all(3, 9, 101, CPU), gumbel_all(3, 9, 151_936, CPU)
    assert torch.equal(large[:101], small)
    assert large.isfinite().all()
    assert len(large.unique()) > 151_936 - 1000  # in fp32 a few hundred meet


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 33, 63])
def test_every_bit_of_the_seed_counts(bit: int) -> None:
    a, b = gumbel_all(5, 40, 64, CPU), gumbel_all(5 ^ 1 << bit, 40, 64, CPU)
    assert not (a == b).any()
    assert coin(5, 40, 0) != coin(5 ^ 1 << bit, 40, 0)


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """The first draws of requests seeded 0, 1, 2, … must not move together."""
    size = 4000
    by_position = torch.stack([gumbel_all(1, p, size, CPU) for p in range(12)])
    by_seed = torch.stack([gumbel_all(s, 1, size, CPU) for s in range(2, 14)])
    correlation = torch.cat((by_position, by_seed)).corrcoef().fill_diagonal_(0.0)
    assert correlation.abs().max() < 5 / size**0.5
    tokens_apart = by_position.T[:40].corrcoef().fill_diagonal_(0.0)
    assert tokens_apart.abs().max() < 5 / 12**0.5


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_noise_is_gumbel(along: str) -> None:
    if along == "tokens":
        sample = gumbel_all(17, 3, 50_000, CPU)
    elif along == "positions":
        sample = torch.cat([gumbel_all(17, p, 4, CPU) for p in range(3000)])
    else:
        sample = torch.cat([gumbel_all(s, 3, 4, CPU) for s in range(3000)])
    assert stats.kstest(sample.numpy(), "gumbel_r").pvalue > 1e-3


def test_the_extreme_words_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in (0, ONES):
        words = torch.full((1, 4), word)
        monkeypatch.setattr("specdec.noise.philox", lambda counter, seed, w=words: w)
        noise = gumbel_all(0, 0, 4, CPU)
        assert noise.isfinite().all() and noise.abs().max() < 24
        assert 0.0 < coin(0, 0, 0) < 1.0


def words_of_all_kinds() -> Tensor:
    """The ends, both sides of every power of two, the seams of the logarithms, and a lattice."""
    seams = [round(2**32 * u) for u in (1 - 0.5**0.5, 0.5, 1 - math.exp(-1), 1 - 0.5**1.5)]
    near = [torch.arange(seam - 2000, seam + 2000) for seam in seams]
    powers = [torch.arange(max(0, 2**bit - 500), 2**bit + 500) for bit in range(32)]
    ends = [torch.arange(5000), torch.arange(2**32 - 5000, 2**32)]
    return torch.cat((*near, *powers, *ends, torch.arange(0, 2**32, 30_011)))


def test_noise_is_accurate_in_both_tails() -> None:
    words = words_of_all_kinds()
    u, rest = (words.double() + 0.5) * 2.0**-32, ((words ^ ONES).double() + 0.5) * 2.0**-32
    exact = -torch.log(torch.where(u < 0.5, -torch.log1p(-u), -torch.log(rest)))
    error = (gumbel_of_words(words).double() - exact).abs()
    assert (error / exact.abs().clamp_min(1.0)).max() < 4e-7
    ends = gumbel_of_words(torch.tensor([0, ONES])).tolist()
    assert ends == pytest.approx([33 * math.log(2), -math.log(33 * math.log(2))], rel=4e-7)


def test_negative_log_is_accurate_and_exact_at_one() -> None:
    bits = torch.arange(0x00800000, 0x7F800000, 20_011, dtype=torch.int32)
    x = torch.cat((bits.view(torch.float32), torch.linspace(0.5, 2.0, 50_001)))
    exact = -x.double().log()
    error = (negative_log(x).double() - exact).abs()
    assert (error / exact.abs().clamp_min(1.0)).max() < 2e-7
    assert float(negative_log(torch.tensor(1.0))) == 0.0


def test_the_bits_are_those_of_numpy() -> None:
    """Another library's scalar loops: the same numbers where every operation rounds alike."""
    words = words_of_all_kinds()[::7]
    assert torch.equal(gumbel_of_words(words), torch.from_numpy(numpy_gumbel(words.numpy())))


def numpy_gumbel(words: Any) -> Any:
    """The formula once more, on uint32 words, with rounding only where it says so."""
    f, words = np.float32, words.astype(np.uint32)

    def octave(x: Any) -> tuple[Any, Any]:
        bits = x.view(np.int32)
        exponent = (bits - np.int32(0x3F3504F3)) >> 23
        return exponent, (bits - (exponent << 23)).view(np.float32)

    def minus_log(exponent: Any, below_one: Any) -> Any:
        ratio = below_one / (f(2) - below_one)
        square = ratio * ratio
        series = square * f(0.14935931563377380)
        for coefficient in (0.19988767802715302, 0.33333387970924380):
            series = (series + f(coefficient)) * square
        return (ratio * 2 * series + ratio * 2) + exponent.astype(f) * f(-math.log(2))

    u, rest = ((w.astype(f) + f(0.5)) * f(2.0**-32) for w in (words, ~words))
    exponent, mantissa = octave(rest)
    exponent, mantissa = octave(minus_log(exponent, np.where(exponent < 0, f(1) - mantissa, u)))
    return minus_log(exponent, f(1) - mantissa)


def test_coins_are_uniform_and_apart_from_the_gumbel_noise() -> None:
    coins = torch.tensor([coin(7, p, i) for p in range(600) for i in range(5)]).double()
    assert stats.kstest(coins.numpy(), "uniform").pvalue > 1e-3
    # The coins of a position must not be the uniforms behind its Gumbel noise.
    noise = torch.cat([gumbel_all(7, p, 20, CPU)[::4] for p in range(600)])
    behind = 1 - torch.exp(-torch.exp(-noise.double()))
    for view in (behind, 1 - behind):
        assert not torch.isclose(view, coins, atol=1e-9).any()
    assert abs(float(torch.stack((coins, noise)).corrcoef()[0, 1])) < 5 / 3000**0.5
