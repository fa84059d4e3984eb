"""FixedBudget: how many draft nodes each request may have verified in the next step."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.request import Request


class FixedBudget:
    """The same node budget for every request, less where the request itself asks for less.

    Example: `FixedBudget(16).budgets(scheduler.requests)`.
    """

    def __init__(self, node_budget: int) -> None:
        self._node_budget = node_budget

    def budgets(self, requests: Iterable[Request]) -> dict[str, int]:
        """Node budget by request id, 0 = plain decoding."""
        return {
            request.request_id: (
                self._node_budget
                if request.node_budget is None
                else min(self._node_budget, request.node_budget)
            )
            for request in requests
        }
