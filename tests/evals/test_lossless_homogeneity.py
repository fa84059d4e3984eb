"""The chi-squared test of two samples of token sequences: by hand, under chance, and by power."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specdec.evals.lossless.homogeneity import Draw, Homogeneity, holm, pooled

counts_strategy = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).filter(any), min_size=1, max_size=12
)


@given(counts_strategy)
def test_pooled_cells_are_large_enough_and_lose_nothing(cells: list[tuple[int, int]]) -> None:
    counts = np.array(cells).T
    if counts.sum(axis=1).min() == 0:
        return
    found = pooled(counts)
    assert found.sum(axis=1).tolist() == counts.sum(axis=1).tolist()
    if found.shape[1] > 1:
        assert stats.contingency.expected_freq(found).min() >= 5


def test_pooling_does_not_look_at_the_sides() -> None:
    """Else it would find differences where there are none: only sums over both sides decide."""
    counts = np.array([[30, 9, 4, 2, 0], [30, 3, 8, 0, 2]])
    dealt = np.array([[30, 6, 6, 1, 1], [30, 6, 6, 1, 1]])
    assert pooled(counts).sum(axis=0).tolist() == pooled(dealt).sum(axis=0).tolist()


def test_a_table_by_hand() -> None:
    """Two tokens, 30 and 20 of the one side, 20 and 30 of the other: chi-squared is 4."""
    plain = [(1,)] * 30 + [(2,)] * 20
    other = [(1,)] * 20 + [(2,)] * 30
    found = Homogeneity.of(plain, other, 0)
    assert found is not None
    assert found.statistic == pytest.approx(4) and found.degrees == 1
    assert found.p_value == pytest.approx(0.0455, abs=1e-4)
    assert found.variation == pytest.approx(0.2)
    assert (found.num_draws, found.num_histories) == (100, 1)
    # Mean |difference of shares| of a hypergeometric deal of 50 and 50 to halves.
    deal = stats.hypergeom(100, 50, 50)
    exact = sum(deal.pmf(k) * abs(2 * k - 50) / 50 for k in range(51))
    assert found.by_chance == pytest.approx(exact, rel=0.15)


def test_histories_are_tested_apart_and_added() -> None:
    """How often each history comes is another position's business."""
    first = {1: ((30, 20), (20, 30)), 2: ((10, 40), (20, 80))}
    draws: list[list[Draw]] = [[], []]
    for history, sides in first.items():
        for side, (ones, twos) in zip(draws, sides, strict=True):
            side += [(history, 1)] * ones + [(history, 2)] * twos
    draws[0].append((3, 1))  # a history of one side only, and one that ended: no matter
    draws[1].append((4,))
    found = Homogeneity.of(draws[0], draws[1], 1)
    assert found is not None
    assert found.degrees == 2 and found.num_histories == 2
    assert found.statistic == pytest.approx(4)  # the second history is the same on both sides
    assert found.variation == pytest.approx((100 * 0.2 + 150 * 0.0) / 250)


def test_few_draws_say_nothing() -> None:
    assert Homogeneity.of([(1,)] * 9, [(2,)] * 9, 0) is None
    assert Homogeneity.of([(1,)] * 90, [(1,)] * 90, 0) is None  # nothing else could have come
    assert Homogeneity.of([], [], 0) is None
    assert Homogeneity.of([(1,)], [(1,)], 1) is None


def sequences(rng: np.random.Generator, first: np.ndarray, then: np.ndarray, n: int) -> list[Draw]:
    """Two tokens each; `then` has the second's distribution after each first one."""
    heads = rng.choice(len(first), size=n, p=first)
    return [(int(head), int(rng.choice(then.shape[1], p=then[head]))) for head in heads]


def test_chance_gives_even_p_values() -> None:
    """300 pairs of samples of one distribution; a share of 5 % may lie below 0.05."""
    rng = np.random.default_rng(3)
    first = np.array([0.6, 0.3, 0.06, 0.03, 0.01])
    then = rng.dirichlet(np.full(8, 0.5), size=5)
    low, chance, seen = [0, 0], [0.0, 0.0], [0.0, 0.0]
    for _ in range(300):
        plain, other = (sequences(rng, first, then, 150) for _ in range(2))
        for position in (0, 1):
            found = Homogeneity.of(plain, other, position)
            assert found is not None
            low[position] += found.p_value < 0.05
            chance[position] += found.by_chance
            seen[position] += found.variation
    bounds = stats.binom(300, 0.05).ppf([1e-4, 1 - 1e-4])
    assert all(bounds[0] <= count <= bounds[1] for count in low), low
    assert seen == pytest.approx(chance, rel=0.1)


def test_a_shift_of_the_second_token_is_found_there_and_only_there() -> None:
    rng = np.random.default_rng(4)
    first = np.array([0.7, 0.3])
    then = np.array([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
    shifted = np.array([[0.8, 0.1, 0.1], [0.2, 0.3, 0.5]])
    plain = sequences(rng, first, then, 400)
    other = sequences(rng, first, shifted, 400)
    found = [Homogeneity.of(plain, other, position) for position in (0, 1)]
    assert found[0] is not None and found[0].p_value > 1e-3
    assert found[1] is not None and found[1].p_value < 1e-9
    assert found[1].variation > 2 * found[1].by_chance


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_holm_is_the_closed_test_of_bonferroni(p_values: list[float]) -> None:
    """A hypothesis falls if every intersection that holds it falls by Bonferroni (Marcus 1976)."""
    numbers = range(len(p_values))
    for index, corrected in enumerate(holm(p_values)):
        worst = max(
            min(1.0, len(group) * min(p_values[member] for member in group))
            for size in range(1, len(p_values) + 1)
            for group in itertools.combinations(numbers, size)
            if index in group
        )
        assert corrected == pytest.approx(worst)
