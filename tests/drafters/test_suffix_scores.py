"""Scores of the suffix drafter's guesses against a slow count over the text."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafters import suffix, suffix_automaton
from specdec.drafters.suffix import DOUBT, MIN_REACH, follow
from specdec.drafters.suffix_automaton import SuffixAutomaton


def places(text: Sequence[int], substring: Sequence[int]) -> list[int]:
    """Where the substring ends in the text."""
    size = len(substring)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == substring]


def what_follows(text: Sequence[int], substring: list[int]) -> dict[int, int]:
    """How often each token follows the substring."""
    found: dict[int, int] = {}
    for end in places(text, substring):
        if end < len(text):
            found[text[end]] = found.get(text[end], 0) + 1
    return found


def shorter(text: Sequence[int], substring: list[int]) -> list[int]:
    """The longest suffix of the substring that ends at more places."""
    ends = places(text, substring)
    return next(
        substring[start:]
        for start in range(1, len(substring) + 1)
        if start == len(substring) or places(text, substring[start:]) != ends
    )


def slow_scores(text: list[int], matched: list[int]) -> dict[int, float]:
    """The score of each token after the matched end of the text, by scanning it."""
    while matched and not what_follows(text, matched):
        matched = shorter(text, matched)
    if not matched:
        return {}
    found = what_follows(text, matched)
    total, discount = sum(found.values()), DOUBT / (DOUBT + len(matched))
    scores = {token: (times - discount) / total for token, times in found.items()}
    rest = discount * len(found) / total
    matched = shorter(text, matched)
    found = what_follows(text, matched) if matched else {}
    total, discount = sum(found.values()), DOUBT / (DOUBT + len(matched))
    for token, times in found.items():
        scores.setdefault(token, rest * (times - discount) / total)
    return scores


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_scores_are_those_of_a_slow_count(text: list[int]) -> None:
    with (
        patch.object(suffix_automaton, "MAX_COUNTED", 10**6),
        patch.object(suffix, "MAX_SUMMED", 10**6),
    ):
        automaton = SuffixAutomaton()
        automaton.extend(text)
        match = automaton.repeated()
        guesses = follow(automaton, match.state, match.length)
        got = {token: score for score, token, _, _ in guesses}
        expected = slow_scores(text, text[len(text) - match.length :])
        assert len(got) == len(guesses)
        assert got == pytest.approx({t: s for t, s in expected.items() if s >= MIN_REACH})
