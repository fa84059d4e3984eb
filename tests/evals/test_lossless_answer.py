"""`specdec eval lossless`: where answers part, and how close the target's choice was there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import UsageError
from specdec.evals.data.sample import Sample
from specdec.evals.lossless.answer import Answer, first_difference
from specdec.evals.lossless.margin import Margin, default_tie_margin
from specdec.evals.lossless.question import check_names, check_temperatures, seeds_of
from specdec.params import SamplingParams
from specdec.sampling import Sampler

token_ids = st.lists(st.integers(0, 3), max_size=8).map(tuple)


def answer(ids: tuple[int, ...] | None, text: str = "", reason: str = "length") -> Answer:
    return Answer(text, ids, reason)


@given(token_ids, token_ids)
def test_answers_differ_first_where_their_prefixes_do(
    plain: tuple[int, ...], other: tuple[int, ...]
) -> None:
    found = first_difference(answer(plain), answer(other))
    if plain == other:
        assert found is None
        return
    assert found is not None
    lengths = range(1 + min(len(plain), len(other)))
    longest = max(length for length in lengths if plain[:length] == other[:length])
    assert found.position == longest
    assert (found.plain,) == (plain[longest : longest + 1] or (None,))
    assert (found.other,) == (other[longest : longest + 1] or (None,))


def test_the_reason_of_the_end_is_part_of_the_answer() -> None:
    found = first_difference(answer((1, 2)), answer((1, 2), reason="stop"))
    assert found is not None and found.position == 2 and found.plain is found.other is None


def test_texts_are_compared_where_one_side_has_no_tokens() -> None:
    found = first_difference(answer((1, 2), "abc"), answer(None, "abd"))
    assert found is not None and (found.position, found.plain, found.other) == (2, "c", "d")
    assert first_difference(answer((1, 2), "abc"), answer(None, "abc")) is None


@given(ids=token_ids, steps=st.integers(0, 9))
def test_an_answer_survives_the_journal(ids: tuple[int, ...], steps: int) -> None:
    one = Answer("text", ids, "stop", steps, 2, ("ngram 1",))
    assert Answer.from_json(one.as_json()) == one
    assert Answer.from_json(answer(None).as_json()).token_ids is None


@given(
    seed=st.integers(0, 2**64 - 1),
    logits_seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    num_prompt=st.integers(1, 50),
)
def test_the_samplers_choice_has_the_best_score(
    seed: int, logits_seed: int, temperature: float, num_prompt: int
) -> None:
    logits = 3 * torch.randn(12, generator=torch.Generator().manual_seed(logits_seed))
    params = SamplingParams(temperature=temperature)
    sampler = Sampler(params, range(num_prompt), seed=seed, eos_token_ids=())
    best = sampler.choose(logits, [1, 2])
    without = logits.clone()
    without[best] = float("-inf")
    second = sampler.choose(without, [1, 2])
    log_probs = dict(enumerate(logits.log_softmax(0).tolist()))
    margins = {
        token: Margin.of(
            log_probs, (best, token), temperature=temperature, seed=seed, position=num_prompt + 2
        )
        for token in range(12)
    }
    assert margins[best].gap == 0
    assert margins[second].gap == pytest.approx(margins[second].top2, abs=1e-6)
    assert all(one.gap >= one.top2 - 1e-6 for token, one in margins.items() if token != best)
    if temperature == 0:
        assert margins[second].gap == pytest.approx(float(logits[best] - logits[second]), abs=1e-5)


def test_the_worse_of_the_two_tokens_counts() -> None:
    """Another computation may have swapped either with the best."""
    log_probs = {5: -0.1, 6: -0.2, 7: -3.1}
    swapped = [
        Margin.of(log_probs, pair, temperature=0, seed=0, position=9) for pair in ((5, 7), (7, 5))
    ]
    assert [one.gap for one in swapped] == pytest.approx([3.0, 3.0])
    assert swapped[0].top2 == pytest.approx(0.1)


def test_what_rounding_can_do_grows_as_the_temperature_falls() -> None:
    margin = Margin(0.3, 0.3)
    assert not margin.is_near_tie(0.25, 0.0) and not margin.is_near_tie(0.25, 1.0)
    assert margin.is_near_tie(0.25, 0.5) and not margin.is_near_tie(0.25, 2.0)
    assert Margin(0.1, 0.25).is_near_tie(0.25, 0.0)


def test_the_coarsest_precision_decides() -> None:
    assert default_tie_margin("fp32", "auto") < default_tie_margin("fp16", "auto")
    assert default_tie_margin("fp32", "int8") == default_tie_margin("bf16", "auto") == 0.25
    assert default_tie_margin("int4", "fp32") == default_tie_margin("bf16", "fp32") == 0.25
    assert default_tie_margin("fp32", "fp32") == default_tie_margin("fp32", "auto")


def test_seeds_belong_to_the_sample() -> None:
    one, other = Sample("a", "t"), Sample("b", "t")
    assert list(seeds_of(one, 3))[:2] == list(seeds_of(one, 2))
    assert not set(seeds_of(one, 3)) & set(seeds_of(other, 3))


def test_lists_are_checked() -> None:
    assert check_temperatures("0, 0.7,0") == (0.0, 0.7)
    for wrong in ("", "a", "-1", "101", "nan"):
        with pytest.raises(UsageError, match="--temperature takes numbers"):
            check_temperatures(wrong)
    check_names(("a", "b"), "--drafter")
    with pytest.raises(UsageError, match="--drafter a is given twice"):
        check_names(("a", "b", "a"), "--drafter")
