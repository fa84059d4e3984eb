"""Every sampling parameter that makes no sense is one clear error that names it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specdec.errors import InvalidRequest
from specdec.params import MAX_LOGPROBS, SEED_RANGE, SamplingParams
from specdec.request import Request

NAN, INF = math.nan, math.inf
HUGE = 10**400  # an integer that no float can hold

BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, NAN, INF],
    "temperature": [-0.1, NAN, INF, -INF, 100.5, HUGE],
    "top_k": [-1, NAN, INF],
    "top_p": [0.0, -0.5, 1.01, NAN, INF, HUGE],
    "min_p": [-0.01, 1.01, NAN],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "repetition_penalty": [0.0, -1.0, NAN, INF, 101.0],
    "min_tokens": [-1, 17, NAN],
    "seed": [-1, SEED_RANGE, HUGE],
    "logprobs": [-1, MAX_LOGPROBS + 1],
    "allowed_token_ids": [frozenset()],
    "stop": [("",), ("a", "")],
    "bad_words": [((),), ((1,), ())],
    "logit_bias": [{3: NAN}, {3: 0.0, 4: INF}, {3: -INF}, {3: HUGE}, {3: 1e39}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs], ids=lambda v: str(v)[:20]
)
def test_bad_value(name: str, value: Any) -> None:
    settings: dict[str, Any] = {"max_tokens": 16, name: value}
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**settings)
    assert caught.value.param == name
    message = str(caught.value)
    assert name in message.replace("stop strings", "stop")
    assert "\n" not in message


EDGES: dict[str, list[Any]] = {
    "max_tokens": [1, 10**12, HUGE],
    "temperature": [0.0, 1e-300, 100.0, 1],
    "top_k": [0, 1, 10**12, HUGE],
    "top_p": [1e-9, 1.0, 1],
    "min_p": [0.0, 1.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "repetition_penalty": [1e-3, 100.0],
    "min_tokens": [0, 256],
    "seed": [None, 0, SEED_RANGE - 1],
    "logprobs": [None, 0, MAX_LOGPROBS],
    "allowed_token_ids": [None, frozenset({0})],
    "logit_bias": [{}, {3: -100.0}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, vs in EDGES.items() for v in vs], ids=lambda v: str(v)[:20]
)
def test_edges_are_allowed(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("bad_id", [-1, 24])
@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("logit_bias", lambda i: {3: 1.0, i: 1.0}),
        ("allowed_token_ids", lambda i: frozenset({3, i})),
        ("stop_token_ids", lambda i: frozenset({i})),
        ("bad_words", lambda i: ((1, 2), (3, i))),
    ],
)
def test_token_ids_outside_the_vocabulary(name: str, wrap: Any, bad_id: int) -> None:
    params = SamplingParams(**{name: wrap(bad_id)})
    with pytest.raises(InvalidRequest, match=f"{name}: token id {bad_id} .*vocabulary of 24") as e:
        params.check_vocab(24)
    assert e.value.param == name
    SamplingParams(**{name: wrap(0)}).check_vocab(24)
    SamplingParams(**{name: wrap(23)}).check_vocab(24)


def test_nan_temperature_is_not_greedy_by_accident() -> None:
    """NaN fails every comparison, so a check written as `value < low` would let it through."""
    with pytest.raises(InvalidRequest, match="temperature must be at least 0 and at most 100"):
        SamplingParams(temperature=NAN)
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    """Dividing fp32 logits by 1e-40 gives infinities, whose softmax is NaN."""
    assert SamplingParams(temperature=1e-40).is_greedy


def test_a_seed_that_is_not_given_is_drawn_from_all_that_there_are() -> None:
    seeds = [Request("r", (1,), SamplingParams()).seed for _ in range(40)]
    assert len(set(seeds)) == 40
    assert 2**60 < max(seeds) < SEED_RANGE
