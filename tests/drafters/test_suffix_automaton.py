"""SuffixAutomaton: counts, repeated suffixes and matches against a slow search of the texts."""

from __future__ import annotations

import tracemalloc
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafters import suffix_automaton
from specdec.drafters.suffix_automaton import (
    MAX_COUNTED,
    MAX_FOLLOWERS,
    NONE,
    ROOT,
    SuffixAutomaton,
    SuffixMatch,
)

Texts = list[list[int]]
short_texts = st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=3)


def automaton_of(texts: Sequence[Sequence[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.begin()
        automaton.extend(text)
    return automaton


def exact_automaton(texts: Sequence[Sequence[int]]) -> SuffixAutomaton:
    """All suffixes counted, however many there are."""
    with patch.object(suffix_automaton, "MAX_COUNTED", 10**6):
        return automaton_of(texts)


def occurrences(texts: Sequence[Sequence[int]]) -> Counter[tuple[int, ...]]:
    """How often each substring occurs."""
    return Counter(
        tuple(text[start:end])
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, len(text) + 1)
    )


def state_after(automaton: SuffixAutomaton, token_ids: Sequence[int]) -> int:
    state = ROOT
    for token_id in token_ids:
        state = automaton.step(state, token_id)
        if state == NONE:
            break
    return state


@settings(deadline=None)
@given(short_texts)
def test_knows_each_substring_its_count_and_what_follows(texts: Texts) -> None:
    automaton = exact_automaton(texts)
    found = occurrences(texts)
    for substring, num_found in found.items():
        state = state_after(automaton, substring)
        assert automaton.counts[state] == num_found
        assert automaton.lengths[automaton.links[state]] < len(substring)
        assert len(substring) <= automaton.lengths[state]
        followers = {t: automaton.counts[after] for t, after in automaton.followers(state)}
        assert followers == {t: found[*substring, t] for t in range(3) if (*substring, t) in found}
    assert automaton.num_states <= 1 + 2 * sum(map(len, texts))


@settings(deadline=None)
@given(short_texts, st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_knows_nothing_else(texts: Texts, substring: list[int]) -> None:
    is_known = tuple(substring) in occurrences(texts)
    assert (state_after(automaton_of(texts), substring) != NONE) == is_known


@settings(deadline=None)
@given(short_texts)
def test_counts_are_never_too_high_and_right_for_the_longest_suffixes(texts: Texts) -> None:
    capped, exact = automaton_of(texts), exact_automaton(texts)
    assert all(low <= high for low, high in zip(capped.counts[1:], exact.counts[1:], strict=True))
    depths = [0] * exact.num_states
    for state in sorted(range(1, exact.num_states), key=exact.lengths.__getitem__):
        depths[state] = depths[exact.links[state]] + 1
    if max(depths) <= MAX_COUNTED:
        assert capped.counts[1:] == exact.counts[1:]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_repeated_suffix_is_the_longest_that_occurs_before(text: list[int]) -> None:
    match = automaton_of([text]).repeated()
    before = occurrences([text[:-1]])
    lengths = [n for n in range(1, len(text)) if tuple(text[-n:]) in before]
    assert match.length == max(lengths, default=0)
    assert match.state == state_after(match.automaton, text[len(text) - match.length :])


def test_a_known_text_adds_no_states() -> None:
    """What a tenant's requests have in common, such as a system prompt, is stored once."""
    text = [i * i % 31 for i in range(200)]
    once, twice = automaton_of([text]), automaton_of([text, text])
    assert twice.num_states == once.num_states
    assert twice.counts[twice.last] == 2


def longest_known(texts: Sequence[Sequence[int]], text: Sequence[int]) -> int:
    known = occurrences(texts)
    return max((n for n in range(1, len(text) + 1) if tuple(text[-n:]) in known), default=0)


@settings(deadline=None)
@given(short_texts, st.lists(st.integers(0, 3), max_size=20))
def test_match_is_the_longest_known_suffix(texts: Texts, text: list[int]) -> None:
    match = SuffixMatch(automaton_of(texts))
    for end in range(1, len(text) + 1):
        match.extend(text[end - 1 : end])
        assert match.length == longest_known(texts, text[:end])
        assert match.state == state_after(match.automaton, text[end - match.length : end])


@settings(deadline=None)
@given(short_texts, st.lists(st.integers(0, 2), max_size=12), st.integers(0, 12))
def test_match_stays_right_while_the_automaton_grows(
    texts: Texts, text: list[int], cut: int
) -> None:
    """States are split as texts come, so that a match's state may come to mean longer strings."""
    cut = min(cut, len(text))
    match = SuffixMatch(automaton_of(texts[:1]))
    match.extend(text[:cut])
    length = match.length
    for more in texts[1:]:
        match.automaton.begin()
        match.automaton.extend(more)
    match.settle()
    assert match.length == length
    assert match.state == state_after(match.automaton, text[cut - length : cut])
    match.extend(text[cut:])
    known = text[len(text) - match.length :]
    assert match.state == state_after(match.automaton, known) != NONE
    assert longest_known(texts[:1], text) <= match.length <= longest_known(texts, text)


def test_followers_are_the_first_of_many() -> None:
    text = [token for follower in range(100, 100 + 2 * MAX_FOLLOWERS) for token in (7, follower)]
    automaton = automaton_of([text])
    followers = [token for token, _ in automaton.followers(state_after(automaton, [7]))]
    assert followers == list(range(100, 100 + MAX_FOLLOWERS))


@pytest.mark.parametrize("num_symbols", [1, 4, 40, 100_000])
def test_bytes_are_bounded(num_symbols: int) -> None:
    """Against what Python allocates; numbers of an array are made anew where a dict keeps them."""
    text = array("i", [i * i * 7919 % 99_991 % num_symbols for i in range(20_000)])
    automaton_of([[1]])  # what the first use allocates for good is no automaton's
    tracemalloc.start()
    automaton = automaton_of([text])
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert allocated <= automaton.num_bytes <= 3 * allocated


class CountingArray:
    """Counts reads and writes of an array's elements."""

    def __init__(self, values: array[int]) -> None:
        self.values = values
        self.num_uses = 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> int:
        self.num_uses += 1
        return self.values[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.num_uses += 1
        self.values[index] = value

    def append(self, value: int) -> None:
        self.num_uses += 1
        self.values.append(value)

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("read as a whole")


def counted(automaton: SuffixAutomaton, token_ids: Sequence[int]) -> int:
    """Reads and writes of the automaton's arrays while it takes these tokens."""
    arrays = []
    for name in ("lengths", "links", "counts", "_tokens", "_targets"):
        arrays.append(CountingArray(getattr(automaton, name)))
        setattr(automaton, name, arrays[-1])
    automaton.extend(token_ids)
    for name, counting in zip(
        ("lengths", "links", "counts", "_tokens", "_targets"), arrays, strict=True
    ):
        setattr(automaton, name, counting.values)
    return sum(counting.num_uses for counting in arrays)


@pytest.mark.parametrize("period", [1, 97, 2999])
def test_cost_of_a_token_does_not_grow_with_the_text(period: int) -> None:
    """Counted, not timed: three times the text, the same number of operations."""
    text = [i * i % 1009 for i in range(period)] * (100_000 // period)
    costs = []
    for length in (32_000, 96_000):
        end = length // period * period
        costs.append(counted(automaton_of([text[:end]]), text[end : end + 50]))
    assert costs[0] == costs[1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 40))
def test_cost_is_bounded_over_a_whole_text(text: list[int], num_repeats: int) -> None:
    """A token that ends a repetition pays for all of it; together they pay a constant each.

    Per token: the walk over `MAX_COUNTED` suffixes reads and writes 3 numbers each; all else is the
    classic bound of 2 states and 3 transitions, with at most 12 uses for either.
    """
    text = [*text * num_repeats, 9]
    assert counted(SuffixAutomaton(), text) <= len(text) * (3 * MAX_COUNTED + 5 * 12)
