"""Prompt lookup: which continuations are found, in which order, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters import ngram
from specdec.drafters.ngram import NUM_MATCHES, SIZES, NgramDrafter, NgramIndex
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request, TokenRecord
from specdec.tree import DraftTree
from specdec.verification import NO_VERDICT


def index_of(token_ids: Sequence[int]) -> NgramIndex:
    index = NgramIndex()
    index.extend(token_ids)
    return index


def slow_continuations(token_ids: list[int], length: int) -> list[tuple[int, list[int]]]:
    """Looks for the suffix at every earlier place of the list."""
    found: dict[int, int] = {}
    for size in SIZES:
        suffix = token_ids[-size:]
        places = [
            end
            for end in range(len(token_ids) - 1, size - 1, -1)
            if len(suffix) == size and token_ids[end - size : end] == suffix
        ]
        for place in places[:NUM_MATCHES]:
            found.setdefault(place, size)
    result = []
    for place, size in found.items():
        text = list(token_ids)
        while len(text) < place + length:
            text.append(text[len(text) - (len(token_ids) - place)])
        result.append((size, text[place : place + length]))
    return result


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 12), st.integers(0, 40))
def test_equals_a_slow_search(token_ids: list[int], length: int, cut: int) -> None:
    index = index_of(token_ids[:cut])
    index.extend(token_ids[cut:])  # in two parts, as prompt and output come
    assert index.continuations(length) == slow_continuations(token_ids, length)


def test_longest_suffix_comes_before_a_more_recent_short_one() -> None:
    text = [1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 1, 2, 3, 4]
    assert index_of(text).continuations(1) == [(4, [50]), (2, [60])]


def test_most_recent_comes_first_and_the_oldest_is_dropped() -> None:
    text = [1, 2, 50, 1, 2, 60, 1, 2, 70, 1, 2]
    assert index_of(text).continuations(1) == [(2, [70]), (2, [60])]


def test_periodic_text_goes_on_past_its_end() -> None:
    for period in ([7], [7, 8], [7, 8, 9]):
        text = period * 6
        (_, first), *_ = index_of(text).continuations(20)
        assert first == (period * 30)[:20]


def test_nothing_matches_in_short_or_fresh_text() -> None:
    for text in ([], [1], [1, 2], [1, 2, 3], [1, 1], [5, 1, 2, 3, 1]):
        assert index_of(text).continuations(5) == []


def request(name: str, token_ids: Sequence[int]) -> Request:
    return Request(name, tuple(token_ids), SamplingParams())


def draft(drafter: NgramDrafter, req: Request, node_budget: int) -> DraftTree:
    (tree,) = drafter.draft([DecodeStep(req, node_budget)])
    assert tree.token_ids[0] == req.token_ids[-1]
    assert tree.num_nodes <= 1 + node_budget
    return tree


def paths(tree: DraftTree) -> list[list[int]]:
    leaves = [n for n in range(tree.num_nodes) if not tree.children[n]]
    return [[tree.token_ids[n] for n in tree.path(leaf)[1:]] for leaf in leaves]


def test_several_continuations_become_one_tree() -> None:
    drafter = NgramDrafter()
    req = request("a", [1, 2, 50, 51, 9, 1, 8, 1, 2, 50, 61, 9, 1, 7, 1, 2])
    drafter.admit(req)
    tree = draft(drafter, req, 16)
    assert paths(tree) == [[50, 61, 9, 1], [50, 51, 9, 1]]
    assert tree.children[0] == (1,)  # shared prefix
    assert set(tree.sources[1:]) == {("ngram",)}
    assert paths(draft(drafter, req, 5)) == [[50, 61, 9, 1], [50, 51]]  # the first path wins


def test_a_long_match_is_trusted_further_than_a_short_one() -> None:
    drafter = NgramDrafter()
    text = list(range(100, 140))
    long, short = request("a", [*text, *text[:4]]), request("b", [*text, *text[:2]])
    for req in (long, short):
        drafter.admit(req)
    assert draft(drafter, long, 12).num_nodes == 13
    assert draft(drafter, short, 12).num_nodes == 5


def test_budget_zero_and_no_match_give_the_root_only() -> None:
    drafter = NgramDrafter()
    req = request("a", [1, 2, 1, 2, 1, 2])
    other = request("b", [1, 2, 3, 4])
    for r in (req, other):
        drafter.admit(r)
    trees = drafter.draft([DecodeStep(req, 0), DecodeStep(other, 9), DecodeStep(req, 1)])
    assert [tree.num_nodes for tree in trees] == [1, 1, 2]


def test_requests_never_see_each_other() -> None:
    """A shared index would leak one tenant's text into another's drafts."""
    drafter = NgramDrafter()
    secret, other = request("a", [1, 2, 42, 43, 1, 2]), request("b", [1, 2, 9, 7, 1, 2])
    for req in (secret, other):
        drafter.admit(req)
    trees = drafter.draft([DecodeStep(secret, 8), DecodeStep(other, 8)])
    assert {42, 43} <= set(trees[0].token_ids)
    assert not {42, 43} & set(trees[1].token_ids)


def test_release_forgets_and_an_id_can_return() -> None:
    drafter = NgramDrafter()
    first = request("a", [1, 2, 42, 1, 2])
    drafter.admit(first)
    assert draft(drafter, first, 4).num_nodes > 1
    drafter.release(first)
    drafter.release(first)  # as after an abort
    assert not drafter._indexes
    again = request("a", [3, 1, 2])
    drafter.admit(again)
    assert draft(drafter, again, 4).num_nodes == 1


def test_output_is_read_as_it_grows() -> None:
    drafter = NgramDrafter()
    req = request("a", [1, 2, 50])
    drafter.admit(req)
    assert draft(drafter, req, 4).num_nodes == 1
    for token_id in (1, 2):
        req.append(TokenRecord(token_id, ("target",), 1, 0), ())
        drafter.observe(req, NO_VERDICT, None)
    assert paths(draft(drafter, req, 2)) == [[50, 1]]


class CountingDict(dict[tuple[int, ...], tuple[int, ...]]):
    """Counts look-ups and updates."""

    num_uses = 0

    def get(self, *args: Any) -> Any:
        self.num_uses += 1
        return super().get(*args)

    def __setitem__(self, key: tuple[int, ...], value: tuple[int, ...]) -> None:
        self.num_uses += 1
        super().__setitem__(key, value)


class CountingList(list[int]):
    """Counts the elements that are read."""

    num_uses = 0

    def __getitem__(self, key: Any) -> Any:
        result = super().__getitem__(key)
        self.num_uses += len(result) if isinstance(key, slice) else 1
        return result

    def __iter__(self) -> Iterator[int]:
        self.num_uses += len(self)
        return super().__iter__()


def test_cost_of_a_step_does_not_grow_with_the_context() -> None:
    """Counted, not timed: 50 times the context, the same number of operations."""
    costs = []
    for length in (1_000, 50_000):
        drafter = NgramDrafter()
        req = request("a", [i % 97 for i in range(length // 97 * 97)])
        drafter.admit(req)
        draft(drafter, req, 16)
        index = drafter._indexes["a"]
        index._places = places = CountingDict(index._places)
        index.token_ids = own = CountingList(index.token_ids)
        req.token_ids = known = CountingList(req.token_ids)
        for token_id in range(5):
            req.append(TokenRecord(token_id, ("target",), 1, 0), ())
            assert draft(drafter, req, 16).num_nodes == 17
        costs.append((places.num_uses, own.num_uses, known.num_uses))
        assert all(len(at) <= ngram.NUM_MATCHES for at in places.values())
    assert costs[0] == costs[1]
    assert max(costs[0]) < 500
