"""Ranking: a drafter with the target's own logits guesses what the target will choose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.drafters.ranking import Guess, rank
from specdec.noise import gumbel_all
from specdec.params import SamplingParams
from specdec.request import Request
from specdec.sampling import Sampler

PROMPT = (1, 2, 3)
seeds = st.integers(0, 2**64 - 1)


def request(name: str, temperature: float, seed: int = 0) -> Request:
    return Request(name, PROMPT, SamplingParams(temperature=temperature, seed=seed))


def choice(req: Request, position: int, logits: Tensor) -> int:
    """The oracle: what the target chooses at a position, from the same row."""
    sampler = Sampler(req.params, req.prompt_ids, seed=req.seed, eos_token_ids=())
    return sampler.choose(logits, [0] * (position - len(PROMPT)))


def logits_of(seed: int, num_rows: int, vocab_size: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed % 2**63)
    return spread * torch.randn(num_rows, vocab_size, generator=generator)


@settings(deadline=None)
@given(st.sampled_from([0.0, 0.5, 0.7, 1.0, 1.3, 2.0]), seeds, st.integers(0, 200))
def test_the_first_guess_is_the_targets_choice(
    temperature: float, seed: int, num_output: int
) -> None:
    req = request("a", temperature, seed)
    positions = [len(PROMPT) + num_output + row for row in range(4)]
    logits = logits_of(seed, 4, 200)
    ranked = rank(logits, [Guess(req, position) for position in positions], count=3)
    want = [choice(req, *pair) for pair in zip(positions, logits, strict=True)]
    assert [found.token_ids[0] for found in ranked] == want


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_so_it_is_in_a_large_vocabulary(temperature: float) -> None:
    """Noise lifts choices from far below the top: no token may be left out."""
    req = request("a", temperature, seed=11)
    logits = logits_of(5, 200, 1024)
    ranked = rank(logits, [Guess(req, 40 + row) for row in range(200)], count=4)
    chosen = [choice(req, 40 + row, logits[row]) for row in range(200)]
    assert [found.token_ids[0] for found in ranked] == chosen
    num_above = [int((logits[row] > logits[row, token]).sum()) for row, token in enumerate(chosen)]
    assert max(num_above) > 256 or temperature < 2.0


@settings(deadline=None)
@given(st.sampled_from([0.0, 0.8]), seeds)
def test_columns_stand_for_tokens_of_a_vocabulary(temperature: float, seed: int) -> None:
    req = request("a", temperature, seed)
    vocabulary = torch.arange(60) * 5 + 2
    logits = logits_of(seed, 1, 60)
    (found,) = rank(logits, [Guess(req, 9)], 4, vocabulary)
    whole = torch.full((310,), float("-inf")).index_copy(0, vocabulary, logits[0])
    assert found.token_ids[0] == choice(req, 9, whole)
    assert set(found.token_ids) <= set(vocabulary.tolist())


@settings(deadline=None)
@given(seeds)
def test_requests_in_one_call_are_ranked_as_if_alone(seed: int) -> None:
    made = [request(name, t, seed ^ n) for n, (name, t) in enumerate([("a", 0.0), ("b", 1.0)])]
    made.append(request("c", 0.6, seed))
    order = [0, 1, 0, 2, 1, 2, 0]  # rows of a request need not stand together
    guesses = [Guess(made[index], 9 + row) for row, index in enumerate(order)]
    logits = logits_of(seed, len(order), 80)
    together = rank(logits, guesses, 5)
    for row, guess in enumerate(guesses):
        (alone,) = rank(logits[row : row + 1], [guess], 5)
        assert together[row].token_ids == alone.token_ids
        if guess.request is not made[0]:  # the sum over a row's exponentials may round otherwise
            assert together[row].scores == alone.scores


@settings(deadline=None)
@given(st.sampled_from([0.0, 0.7, 1.0]), seeds, st.integers(1, 30))
def test_scores_are_shares_of_all_tokens_best_first(
    temperature: float, seed: int, count: int
) -> None:
    """Each within the rounding of fp32: of 30 additions, exponentials and one division."""
    req = request("a", temperature, seed)
    logits = logits_of(seed, 1, 30)
    (found,) = rank(logits, [Guess(req, 9)], count)
    assert len(found.token_ids) == count
    row = logits[0].double()
    if temperature:
        noise = gumbel_all(seed, 9, 30, torch.device("cpu"))
        row = row / temperature + noise.double()
    shares = row.softmax(0)
    assert found.scores == sorted(found.scores, reverse=True)
    assert len(set(found.token_ids)) == len(found.token_ids)
    # An exponent as large as x is off by x units, and so is the share by that factor.
    unit = 2.0**-24 * (30 + 4 * float(row.abs().max()))
    for token_id, score in zip(found.token_ids, found.scores, strict=True):
        assert score == pytest.approx(float(shares[token_id]), rel=unit)
    assert sum(found.scores) <= 1.0 + unit


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vocabulary_smaller_than_the_count_is_taken_whole(temperature: float) -> None:
    (found,) = rank(logits_of(1, 1, 3), [Guess(request("a", temperature), 9)], count=8)
    assert sorted(found.token_ids) == [0, 1, 2]


def test_without_noise_a_sampled_request_is_ranked_like_a_greedy_one() -> None:
    logits = logits_of(1, 1, 50)
    greedy, sampled = request("a", 0.0), request("b", 1.0, 5)
    (want,) = rank(logits, [Guess(greedy, 9)], 4)
    assert rank(logits, [Guess(sampled, 9)], 4, uses_noise=False) == [want]
    assert rank(logits, [Guess(sampled, 9)], 4) != [want]
