"""Tokens chosen by the native library are those that PyTorch's operations choose."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import noise
from specdec.native_sampling import NativeSampling, are_finite
from specdec.params import SamplingParams
from specdec.sampling import NothingToChoose, Sampler
from tests.native_session import choosing_natively

INF, NAN = math.inf, math.nan
# Either side of whole registers (16 tokens) and of blocks (64).
vocab_sizes = st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 130, 1000, 5000])
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 0.8, 1.0, 1.7, 30.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 50, 900, 2**40]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    allowed_token_ids=st.sampled_from([None, None, None, frozenset({0})]),
    seed=st.just(0),
)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[ctypes.CDLL]:
    with choosing_natively() as loaded:
        yield loaded


Chosen = tuple[int | None, int | None]


def both(params: SamplingParams, row: Tensor, seed: int, position: int = 5) -> Chosen:
    """The choice where the library helps, and by PyTorch; None where all tokens are banned."""
    library = noise.native()
    sampler = Sampler(params, [0] * position, seed=seed, eos_token_ids=())

    def choice() -> int | None:
        try:
            return sampler.choose(row, [])
        except NothingToChoose:
            return None

    native = choice()
    noise.use_native(None)
    try:
        return native, choice()
    finally:
        noise.use_native(library)


def row_of(shape: str, vocab_size: int, seed: int) -> Tensor:
    """Logits of a kind that the search takes in its own way."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(vocab_size, generator=generator)
    match shape:
        case "usual":
            return row * 4 + 10
        case "flat":
            return row * 1e-3
        case "ties":
            return row.round() * 2
        case "equal":
            return torch.full((vocab_size,), -3.5)
        case "large":  # noise is lost in the rounding of sums
            return row.round() * 2.0**26
        case "peaked":
            return row * 200
        case "banned":
            return torch.where(row > 1.0, row, -INF)
        case _:  # far from zero: a bound that is off by its own rounding would lose the winner
            return row * 0.1 - 3e4


shapes = st.sampled_from(["usual", "flat", "ties", "equal", "large", "peaked", "banned", "far"])


@given(
    params=params_strategy,
    shape=shapes,
    vocab_size=vocab_sizes,
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(1, 3000),
)
@settings(max_examples=1500, deadline=None)
def test_of_any_row(
    params: SamplingParams, shape: str, vocab_size: int, seed: int, position: int
) -> None:
    native, plain = both(params, row_of(shape, vocab_size, seed % 1000), seed, position)
    assert native == plain


@given(
    row=st.lists(st.sampled_from([-1.5, 0.0, -0.0, 0.5, 2.0, -INF]), min_size=1, max_size=90),
    params=params_strategy,
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=500, deadline=None)
def test_of_few_values(row: list[float], params: SamplingParams, seed: int) -> None:
    """Ties everywhere: at the threshold, among the winners, and rows of nothing but -inf."""
    native, plain = both(params, torch.tensor([*row[:40], 0.5, *row[40:]]), seed)
    assert native == plain


@pytest.mark.parametrize("cut", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}])
@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.5])
def test_of_a_whole_vocabulary(temperature: float, cut: dict[str, Any]) -> None:
    params = SamplingParams(temperature=temperature, **cut)
    for seed in range(25):
        native, plain = both(params, row_of("usual", 49152, seed), seed)
        assert native == plain


@given(
    place=st.integers(0, 99),
    value=st.sampled_from([INF, -INF, NAN]),
    count=st.integers(1, 100),
    params=params_strategy,
)
@example(0, NAN, 1, SamplingParams(temperature=0.8, allowed_token_ids=frozenset({0})))
@settings(deadline=None)
def test_of_rows_that_are_not_finite(
    place: int, value: float, count: int, params: SamplingParams
) -> None:
    """The engine refuses such rows before anything is chosen."""
    row = row_of("usual", 100, count)
    row[place : place + count] = value
    try:
        native, plain = both(params, row, count)
    except IndexError:  # NaN is the only token that is allowed: nothing is left, to neither
        allowed = params.allowed_token_ids
        assert allowed is not None and row[list(allowed)].isnan().all()
    else:
        assert native == plain


def test_the_lowest_token_wins_though_a_later_one_was_looked_at_first() -> None:
    row = torch.full((200,), 2.0**30)
    row[150] += 64  # the likeliest; noise and 64 are less than a step of its fp32 sums' rounding
    params = SamplingParams(temperature=1.0)
    for seed in range(20):
        native, plain = both(params, row, seed)
        assert native == plain


def test_the_library_leaves_what_rounding_may_decide(library: ctypes.CDLL) -> None:
    """The mass above the second token is top_p of all, to the last digit or nearly so."""
    row = torch.tensor([1.0, 0.0])
    total = float((row - 1).exp().double().sum())
    left = set()
    for nudge in (0.0, 1e-9, -1e-9, 1e-3, -1e-3):
        params = SamplingParams(temperature=1.0, top_p=(1 + nudge) / total)
        for seed in range(20):
            native, plain = both(params, row, seed)
            assert native == plain
            if NativeSampling(library, params, seed, 1.0, None).choose(row, 5) is None:
                left.add(nudge)
    assert left == {0.0, 1e-9, -1e-9}


def test_the_library_decides_nearly_all_rows(library: ctypes.CDLL) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=200)
    for seed in range(100):
        row = row_of("usual", 5000, seed)
        token_id = NativeSampling(library, params, seed, 1.0, None).choose(row, 5)
        assert token_id == both(params, row, seed)[1]


def test_other_types_and_strides_are_taken_too() -> None:
    params = SamplingParams(temperature=1.0)
    row = row_of("usual", 100, 0)
    assert both(params, row.bfloat16(), 3)[0] == both(params, row.bfloat16().float(), 3)[1]
    spread = torch.stack([row, -row], 1)[:, 0]
    assert not spread.is_contiguous()
    assert both(params, spread, 3)[0] == both(params, row, 3)[1]


@given(
    shape=st.tuples(st.integers(0, 4), st.sampled_from([1, 15, 16, 17, 100])),
    data=st.data(),
)
@settings(deadline=None)
def test_which_rows_are_finite(
    library: ctypes.CDLL, shape: tuple[int, int], data: st.DataObject
) -> None:
    num_rows, vocab_size = shape
    wide = torch.full((num_rows, vocab_size + 3), NAN)  # what lies beside a row is none of it
    logits = wide[:, :vocab_size]
    logits[:] = 3e38  # whose sum is not finite
    for row in range(num_rows):
        if data.draw(st.booleans()):
            place = data.draw(st.integers(0, vocab_size - 1))
            logits[row, place] = data.draw(st.sampled_from([INF, -INF, NAN]))
    assert are_finite(library, logits) == are_finite(None, logits)
    assert are_finite(None, logits) == [bool(row.isfinite().all()) for row in logits]
