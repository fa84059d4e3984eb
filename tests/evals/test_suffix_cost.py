"""SuffixCost: which steps are timed, and what is counted of them."""

from __future__ import annotations

from specdec.evals.suffix_cost import suffix_costs


def test_steps_commit_what_the_text_says() -> None:
    """A repetition is guessed whole but for its beginning; fresh text is never guessed."""
    costs = suffix_costs([1, 2, 3] * 200, contexts=[300], node_budgets=[4, 9])
    assert [(cost.context, cost.node_budget) for cost in costs] == [(300, 4), (300, 9)]
    assert [cost.tokens_per_step for cost in costs] == [5, 10]
    assert [cost.num_nodes for cost in costs] == [4, 9]
    (fresh,) = suffix_costs(range(600), contexts=[300], node_budgets=[4], num_steps=9)
    assert (fresh.tokens_per_step, fresh.num_nodes) == (1, 0)
    for cost in (*costs, fresh):
        assert 0 < cost.median_us <= cost.p99_us
        assert cost.build_us > 0
        assert cost.num_bytes > 300


def test_contexts_that_leave_no_step_are_left_out() -> None:
    costs = suffix_costs([1, 2] * 10, contexts=[10, 19, 20, 1000], node_budgets=[4])
    assert [cost.context for cost in costs] == [10, 19]
