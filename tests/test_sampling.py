"""Each sampling parameter against a slow oracle written from the order of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.noise import gumbel_all
from specdec.params import SamplingParams
from specdec.sampling import NothingToChoose, Sampler, raw_log_probs

VOCAB = 12
EOS = 11
INF = math.inf
CPU = torch.device("cpu")


def sampler_for(params: SamplingParams, prompt: Sequence[int] = (1, 2), seed: int = 0) -> Sampler:
    return Sampler(params, prompt, seed=seed, eos_token_ids=(EOS,))


def law(params: SamplingParams, logits: Tensor, output: Sequence[int] = ()) -> list[float]:
    return sampler_for(params).survivors(logits, output).dense(len(logits)).tolist()


def slow_law(
    params: SamplingParams, logits: list[float], prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """The target's distribution, token by token in plain Python; equal values share their fate."""
    row = list(logits)
    for token in range(len(row)):
        if token in prompt or token in output:
            penalty = params.repetition_penalty
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        if token in output:
            row[token] -= params.presence_penalty
            row[token] -= params.frequency_penalty * list(output).count(token)
        row[token] += params.logit_bias.get(token, 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            row[token] = -INF
        for word in params.bad_words:
            history = list(output)[len(output) - len(word) + 1 :]
            if word[-1] == token and len(output) >= len(word) - 1 and history == list(word[:-1]):
                row[token] = -INF
        if len(output) < params.min_tokens and (token == EOS or token in params.stop_token_ids):
            row[token] = -INF
    if params.temperature == 0:
        best = row.index(max(row))
        return [float(token == best) for token in range(len(row))]
    row = [score / params.temperature for score in row]
    kept = list(range(len(row)))
    if params.top_k:
        last = sorted(row, reverse=True)[min(params.top_k, len(row)) - 1]
        kept = [token for token in kept if row[token] >= last]
    probs = dict(zip(kept, softmax([row[token] for token in kept]), strict=True))
    likeliest = max(probs.values())

    def survives(token: int) -> bool:
        larger = sum(probs[other] for other in probs if row[other] > row[token])
        is_in_nucleus = params.top_p == 1.0 or larger < params.top_p
        return is_in_nucleus and 0 < probs[token] >= params.min_p * likeliest

    kept = [token for token in kept if survives(token)]
    final = softmax([row[token] for token in kept])
    result = [0.0] * len(row)
    for token, prob in zip(kept, final, strict=True):
        result[token] = prob
    return result


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


tokens = st.integers(0, VOCAB - 1)
# Distinct quarters: no ties and no score within rounding of another, at any step's threshold.
rows = st.permutations([0.25 * i - 1.37 for i in range(VOCAB)])
params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 7, VOCAB, VOCAB + 9]),
    top_p=st.sampled_from([1.0, 0.913, 0.5217, 0.0317]),
    min_p=st.sampled_from([0.0, 0.0531, 0.3171]),
    presence_penalty=st.sampled_from([0.0, 0.81, -0.63]),
    frequency_penalty=st.sampled_from([0.0, 0.47, -0.39]),
    repetition_penalty=st.sampled_from([1.0, 1.31, 0.77]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-1.713, 2.237]), max_size=3),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    allowed_token_ids=st.none() | st.just(frozenset(range(0, VOCAB, 2))),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.sampled_from([frozenset(), frozenset({4})]),
)


@given(
    params=params_strategy,
    row=rows,
    prompt=st.lists(tokens, min_size=1, max_size=4),
    output=st.lists(tokens, max_size=5),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=400, deadline=None)
def test_equals_the_oracle(
    params: SamplingParams, row: list[float], prompt: list[int], output: list[int], seed: int
) -> None:
    logits = torch.tensor(row)
    kept = logits.clone()
    sampler = sampler_for(params, prompt, seed)
    want = torch.tensor(slow_law(params, row, prompt, output), dtype=torch.float64)
    got = sampler.survivors(logits, output).dense(VOCAB)
    assert torch.allclose(got, want, atol=1e-6)
    noise = gumbel_all(seed, len(prompt) + len(output), VOCAB, CPU)
    noisy = want.log() + (0.0 if params.is_greedy else noise)
    # The sampler adds in fp32.
    assert noisy[sampler.choose(logits, output)] >= noisy.max() - 1e-5
    assert torch.equal(logits, kept)  # the caller's row is another node's too


@pytest.mark.parametrize("shape", ["flat", "peaked", "two levels", "very peaked", "ties"])
@pytest.mark.parametrize("vocab_size", [255, 257, 1000, 5000])
@pytest.mark.parametrize(
    "cut",
    [(0, 0.9, 0), (0, 0.3, 0), (0, 0.9999, 0), (0, 1, 0.02), (0, 0.95, 1e-3), (300, 0.9, 0)],
)
def test_nucleus_shortcut_equals_the_full_sort(
    shape: str, vocab_size: int, cut: tuple[int, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    row = torch.randn(vocab_size, generator=generator)
    row *= {"flat": 0.05, "peaked": 3.0, "two levels": 0.5, "very peaked": 60.0, "ties": 0.0}[shape]
    if shape == "two levels":
        row[:5] += 8.0
    top_k, top_p, min_p = cut
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    sampler = sampler_for(params)
    short = sampler.survivors(row, [])
    monkeypatch.setattr("specdec.sampling._NUCLEUS_GUESS", vocab_size)
    full = sampler.survivors(row, [])
    assert short.token_ids is not None and full.token_ids is not None
    assert torch.equal(short.token_ids, full.token_ids)
    assert torch.equal(short.log_probs, full.log_probs)


def test_nucleus_reaches_past_the_shortcut() -> None:
    row = -1e-5 * torch.arange(10_000.0)
    flat = sampler_for(SamplingParams(temperature=1.0, top_p=0.5)).survivors(row, [])
    assert flat.token_ids is not None
    masses = row.double().softmax(0).cumsum(0)
    assert len(flat.token_ids) == int((masses < 0.5).sum()) + 1 > 256


def test_top_p_is_over_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of all tokens 0.4 + 0.3 < 0.75 would keep three; of the first two, 0.571 < 0.75 keeps both.
    assert law(SamplingParams(temperature=1.0, top_k=2, top_p=0.75), logits) == pytest.approx(
        [4 / 7, 3 / 7, 0, 0]
    )
    assert law(SamplingParams(temperature=1.0, top_k=2, top_p=0.55), logits) == [1, 0, 0, 0]


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    params = SamplingParams(temperature=1.0, min_p=0.6)
    assert law(params, logits) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert law(SamplingParams(temperature=1.0, min_p=1.0), torch.zeros(4)) == pytest.approx(
        [0.25] * 4
    )


few_values = st.lists(st.sampled_from([-1.5, 0.0, 0.5, 0.75, 2.0]), min_size=VOCAB, max_size=VOCAB)


@given(
    row=few_values,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),  # exact in fp32, so that equals stay equal
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB - 1]),
    top_p=st.sampled_from([1.0, 0.913, 0.5217, 0.0317]),
    min_p=st.sampled_from([0.0, 0.0531, 0.3171, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_equal_values_share_their_fate(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    want = slow_law(params, row, (1, 2), ())
    assert law(params, torch.tensor(row)) == pytest.approx(want, abs=1e-6)
    threshold = sampler_for(params).threshold(torch.tensor(row), [])
    survives = torch.tensor(row) / temperature >= threshold
    assert survives.tolist() == [prob > 0 for prob in want]


@pytest.mark.parametrize("truncation", [{"top_k": 2}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1}])
def test_ties(truncation: dict[str, Any]) -> None:
    """All tokens at a threshold are kept, so more than k may survive."""
    logits = torch.zeros(VOCAB)
    logits[[3, 5, 7]] = 2.0
    params = SamplingParams(temperature=1.0, **truncation)
    chosen = {sampler_for(params, seed=s).choose(logits, []) for s in range(60)}
    assert chosen == {3, 5, 7}
    assert sampler_for(SamplingParams(**truncation)).choose(logits, []) == 3


def test_the_lowest_token_wins_a_tie_of_noisy_scores() -> None:
    """The noise is lost in the rounding of large scores, and equal sums remain."""
    logits = torch.zeros(VOCAB)
    logits[[4, 6, 9]] = 2.0**30
    for top_k in (0, 3):
        params = SamplingParams(temperature=1.0, top_k=top_k)
        assert {sampler_for(params, seed=s).choose(logits, []) for s in range(20)} == {4}


@pytest.mark.parametrize("truncation", [{}, {"top_k": 1, "top_p": 0.5}, {"top_p": 0.5, "min_p": 1}])
def test_a_row_that_is_not_finite_still_yields_a_token(truncation: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.0, **truncation)
    for value in (INF, -INF, math.nan):
        for logits in (torch.full((VOCAB,), value), torch.tensor([0.0] * 7 + [value] * 5)):
            assert 0 <= sampler_for(params).choose(logits, []) < VOCAB


def test_thresholds_in_numbers() -> None:
    logits = torch.tensor([4.0, 1.0, 3.0, 2.0])

    def threshold(**params: Any) -> float:
        return sampler_for(SamplingParams(**params)).threshold(logits, [])

    assert threshold(temperature=1.0) == threshold(temperature=0.0, top_k=2) == -INF
    assert threshold(temperature=1.0, top_k=4) == -INF
    assert threshold(temperature=0.5, top_k=2) == 6.0
    assert threshold(temperature=1.0, top_p=1e-9) == 4.0
    assert threshold(temperature=1.0, min_p=math.exp(-1.5)) == pytest.approx(2.5)
    assert threshold(temperature=1.0, min_p=1e-40) == -INF  # not a normal number in fp32
    logits += 1  # 5 / 0.7 rounds to another number than this product
    assert threshold(temperature=0.7, top_k=1) == float(5 * torch.tensor(1 / 0.7))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_one_allowed_token_is_always_the_answer(
    temperature: float, truncation: dict[str, Any]
) -> None:
    logits = torch.linspace(30.0, -30.0, VOCAB)
    params = SamplingParams(
        temperature=temperature, allowed_token_ids=frozenset({9}), logit_bias={0: 50}, **truncation
    )
    assert law(params, logits) == [float(t == 9) for t in range(VOCAB)]
    assert sampler_for(params).choose(logits, []) == 9


def test_more_than_the_shortcut_allowed_loses_none() -> None:
    allowed = frozenset(range(100, 900))
    params = SamplingParams(temperature=1.0, allowed_token_ids=allowed)
    probs = law(params, torch.zeros(1000))
    assert probs == pytest.approx([1 / 800 if t in allowed else 0.0 for t in range(1000)])


def test_a_row_with_everything_banned_yields_no_token() -> None:
    only: dict[str, Any] = {"allowed_token_ids": frozenset({5}), "bad_words": ((5,),)}
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 2)):
        sampler = sampler_for(SamplingParams(temperature=temperature, top_k=top_k, **only))
        with pytest.raises(NothingToChoose):
            sampler.choose(torch.zeros(VOCAB), [])


def test_a_bad_word_is_banned_only_after_its_beginning() -> None:
    logits = torch.zeros(VOCAB)
    params = SamplingParams(temperature=1.0, bad_words=((3, 4, 5), (6,)))
    begun: list[list[int]] = [[3, 4], [9, 3, 4]]
    for output in [*begun, [], [4], [3, 4, 9], [4, 3]]:
        probs = law(params, logits, output)
        assert (probs[5] == 0.0) is (output in begun)
        assert probs[6] == 0.0 and probs[4] > 0.0
    # The prompt's tokens are not the beginning of a bad word.
    assert sampler_for(params, (3, 4)).survivors(logits, []).dense(VOCAB)[5] > 0


def test_no_end_before_min_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[EOS], logits[4] = 9.0, 8.0
    params = SamplingParams(min_tokens=2, stop_token_ids=frozenset({4}))
    assert sampler_for(params).choose(logits, [1]) not in (EOS, 4)
    assert sampler_for(params).choose(logits, [1, 1]) == EOS


def test_penalties_count_the_output_and_the_prompt_as_documented() -> None:
    logits = torch.full((VOCAB,), 2.0)
    logits[5] = -2.0
    frequency = SamplingParams(frequency_penalty=0.5)
    processed = sampler_for(frequency, (7, 7))._processed(logits, [3, 3, 5])
    assert processed[[3, 5, 7]].tolist() == [1.0, -2.5, 2.0]  # the prompt does not count
    presence = SamplingParams(presence_penalty=0.5)
    processed = sampler_for(presence, (7, 7))._processed(logits, [3, 3, 5])
    assert processed[[3, 5, 7]].tolist() == [1.5, -2.5, 2.0]
    repetition = SamplingParams(repetition_penalty=2.0)
    processed = sampler_for(repetition, (7, 7))._processed(logits, [3, 3, 5])
    assert processed[[3, 5, 7, 8]].tolist() == [1.0, -4.0, 1.0, 2.0]  # once, however often seen


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_bf16_row_is_the_same_row_in_fp32(temperature: float) -> None:
    row = torch.randn(500, generator=torch.Generator().manual_seed(1)).bfloat16()
    params = SamplingParams(
        temperature=temperature, presence_penalty=0.3, top_p=0.9, logit_bias={4: 0.001}
    )
    for seed in range(20):
        narrow, wide = (sampler_for(params, seed=seed) for _ in range(2))
        assert narrow.choose(row, [3]) == wide.choose(row.float(), [3])
        assert torch.equal(
            narrow.survivors(row, [3]).log_probs, wide.survivors(row.float(), [3]).log_probs
        )
    assert row.dtype == torch.bfloat16


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    """logits / 1e-40 overflows fp32: several tokens at +inf, and the softmax of that is NaN."""
    logits = torch.tensor([1.0, 5.0, 3.0])
    for temperature in (1e-2, 1e-5, 1e-6, 1e-40, 1e-300):
        params = SamplingParams(temperature=temperature)
        assert sampler_for(params).choose(logits, []) == 1
        assert law(params, logits) == pytest.approx([0.0, 1.0, 0.0])


def test_same_seed_position_and_row_give_the_same_token() -> None:
    logits = torch.zeros(VOCAB)
    params = SamplingParams(temperature=1.0)
    by_seed = [sampler_for(params, seed=s).choose(logits, [1]) for s in range(40)]
    assert by_seed == [sampler_for(params, seed=s).choose(logits, [8]) for s in range(40)]
    # Only the absolute position counts, not where the prompt ended.
    assert by_seed == [sampler_for(params, (1, 2, 3), s).choose(logits, []) for s in range(40)]
    assert by_seed != [sampler_for(params, seed=s).choose(logits, []) for s in range(40)]
    assert len(set(by_seed)) > 5


def test_raw_log_probs_know_nothing_of_the_parameters() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log() + 5
    logprob, top = raw_log_probs(logits, 2, 2)
    assert logprob == pytest.approx(math.log(0.2))
    assert [token for token, _ in top] == [0, 1]
    assert [value for _, value in top] == pytest.approx([math.log(0.4), math.log(0.3)])
    assert raw_log_probs(logits, 2, 0)[1] == []
    assert len(raw_log_probs(logits, 2, 20)[1]) == 4
