"""The noise is Philox4x32-10, the same for any subset of tokens, and Gumbel distributed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specdec.noise import coin, gumbel, gumbel_all, philox

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
    assert whole.shape == (vocab_size,) and whole.dtype == torch.float64
    assert torch.equal(gumbel(seed, position, torch.tensor(ids)), whole[ids])


def test_a_larger_vocabulary_keeps_the_noise_of_the_smaller() -> None:
    small, large = gumbel_all(3, 9, 101, CPU), gumbel_all(3, 9, 151_936, CPU)
    assert torch.equal(large[:101], small)
    assert large.isfinite().all()
    assert len(large.unique()) > 151_936 - 10  # 32-bit words: a few may meet


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


def test_coins_are_uniform_and_apart_from_the_gumbel_noise() -> None:
    coins = torch.tensor([coin(7, p, i) for p in range(600) for i in range(5)]).double()
    assert stats.kstest(coins.numpy(), "uniform").pvalue > 1e-3
    # The coins of a position must not be the uniforms behind its Gumbel noise.
    noise = torch.cat([gumbel_all(7, p, 20, CPU)[::4] for p in range(600)])
    behind = 1 - torch.exp(-torch.exp(-noise))
    for view in (behind, 1 - behind):
        assert not torch.isclose(view, coins, atol=1e-9).any()
    assert abs(float(torch.stack((coins, noise)).corrcoef()[0, 1])) < 5 / 3000**0.5
