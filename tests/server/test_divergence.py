"""Divergence: the first place where a repetition differs, however its tokens come."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.params import SamplingParams
from specdec.request import FinishReason, TokenRecord
from specdec.server.divergence import NEAR_TIE, Comparison, Divergence
from specdec.server.messages import Output
from specdec.server.shadow_queue import Answered

REASONS: list[FinishReason] = ["stop", "length"]


def answered(output_ids: tuple[int, ...], reason: FinishReason = "stop") -> Answered:
    params = SamplingParams(temperature=0.5, seed=1)
    return Answered("chatcmpl-1 choice 0", (7,), params, "", output_ids, reason)


def record(token_id: int, *top: float) -> TokenRecord:
    return TokenRecord(token_id, ("target",), 1, 0, None, tuple(enumerate(top)))


ids = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


@given(ids, st.sampled_from(REASONS), ids, st.sampled_from(REASONS), st.sets(st.integers(0, 6)))
def test_it_finds_the_first_difference(
    before: tuple[int, ...],
    reason: FinishReason,
    now: tuple[int, ...],
    now_reason: FinishReason,
    cuts: set[int],
) -> None:
    comparison = Comparison(answered(before, reason))
    found, start = None, 0
    for end in [*sorted(cut for cut in cuts if cut <= len(now)), 6]:
        if found is None:
            last = now_reason if end == 6 else None  # maybe without a token
            found = comparison.take(Output("s", [record(i) for i in now[start:end]], last))
        start = end
    ends = (*before, reason), (*now, now_reason)
    if ends[0] == ends[1]:
        assert found is None
        return
    position = next(i for i, (a, b) in enumerate(zip(*ends, strict=False)) if a != b)
    assert found is not None
    assert found.position == position
    for side, token_id, why in (
        (ends[0], found.token_id, found.finish_reason),
        (ends[1], found.plain_token_id, found.plain_finish_reason),
    ):
        shown = side[position]
        assert (token_id, why) == ((None, shown) if isinstance(shown, str) else (shown, None))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "token 3 was answered, now token 4; temperature 0.5"),
        ({"margin": 0.25}, "token 3 was answered, now token 4; temperature 0.5, top-2 margin 0.25"),
        (
            {"margin": NEAR_TIE / 2, "temperature": 0.0},
            "token 3 was answered, now token 4; temperature 0, top-2 margin 0.0500 (near tie)",
        ),
        (
            {"token_id": None, "finish_reason": "length"},
            "the end (length) was answered, now token 4; temperature 0.5",
        ),
        (
            {"plain_token_id": None, "plain_finish_reason": "stop"},
            "token 3 was answered, now the end (stop); temperature 0.5",
        ),
    ],
)
def test_its_line_has_numbers_alone(change: dict[str, Any], line: str) -> None:
    divergence = Divergence("chatcmpl-1 choice 0", 17, 3, None, 4, None, 0.5)
    start = "warning: shadow: chatcmpl-1 choice 0 differs without speculation at output position 17"
    shown = dataclasses.replace(divergence, **change).line
    assert shown.startswith(f"{start}: {line}")
    assert ("near tie" in shown) == ("near tie" in line)


def test_the_margin_is_of_the_place_that_differs() -> None:
    comparison = Comparison(answered((1, 2, 3)))
    tokens = [record(1, -0.1, -5.0), record(5, -0.5, -0.75), record(3, -0.1, -9.0)]
    found = comparison.take(Output("s", tokens))
    assert found is not None
    assert (found.position, found.margin) == (1, 0.25)
