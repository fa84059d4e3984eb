"""Choices: the published lists are trees at every length, and measured ranks give the best one."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config import EngineConfig
from specdec.drafters.medusa import NUM_CHILDREN, MedusaDrafter
from specdec.drafters.medusa_choices import PUBLISHED, Choice, best_choices, worths
from specdec.drafting import DraftContext
from specdec.errors import UsageError
from tests.drafters.toy_drafters import toy_heads
from tests.toy import toy_model


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_beginning_of_a_published_list_is_a_tree(name: str) -> None:
    taken: set[Choice] = {()}
    for choice in PUBLISHED[name]:
        assert choice not in taken
        assert choice[:-1] in taken
        assert 1 <= len(choice) <= 4 and all(0 <= rank < NUM_CHILDREN for rank in choice)
        taken.add(choice)
    assert len(taken) > 50


def test_the_published_list_of_the_name_63() -> None:
    choices = PUBLISHED["mc_sim_7b_63"]
    assert len(choices) == 63
    assert choices[:8] == ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2))
    assert choices[-3:] == ((0, 0, 0, 1), (1, 6), (0, 7, 0))
    by_depth = [sum(len(choice) == depth for choice in choices) for depth in (1, 2, 3, 4)]
    assert by_depth == [10, 28, 23, 2]


ranks_strategy = st.lists(
    st.lists(st.sampled_from([0.0, 0.125, 0.5, 1.0]) | st.floats(0.0, 1.0), min_size=1, max_size=4),
    max_size=3,
)


@settings(deadline=None)
@given(ranks_strategy, st.integers(0, 30))
def test_best_choices_are_the_worthiest_of_all(ranks: list[list[float]], count: int) -> None:
    """Against every path of ranks, multiplied out."""

    def worth(choice: Choice) -> float:
        value = 1.0
        for head, rank in enumerate(choice):
            value *= ranks[head][rank]
        return value

    every = [
        choice
        for depth in range(1, len(ranks) + 1)
        for choice in product(*(range(len(own)) for own in ranks[:depth]))
    ]
    got = best_choices(ranks, count)
    assert len(set(got)) == len(got) == min(count, len(every))
    worths = [worth(choice) for choice in got]
    assert worths == sorted(map(worth, every), reverse=True)[:count]
    for place, choice in enumerate(got):
        assert choice[:-1] in ((), *got[:place])


def test_the_example() -> None:
    assert best_choices([[0.6, 0.2], [0.5, 0.1]], 3) == ((0,), (0, 0), (1,))
    assert best_choices([], 3) == ()


def test_worths_are_products_of_paths_and_fall() -> None:
    assert worths([[0.6, 0.2], [0.5, 0.1]], 3) == (0.6, 0.3, 0.2)
    assert worths([[0.5, 0.25], [0.4]], 16) == (0.5, 0.25, 0.2, 0.1)
    assert worths([], 16) == ()


def test_a_tree_by_ranks_needs_ranks(tmp_path: Path) -> None:
    toy_heads().save(tmp_path, {}, torch.float32)
    context = DraftContext(toy_model(), EngineConfig(), f"{tmp_path}@ranks")
    with pytest.raises(UsageError, match="has no ranks"):
        MedusaDrafter.load(context)
