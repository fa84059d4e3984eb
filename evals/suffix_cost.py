"""SuffixCost: what a step costs the suffix drafter, by length of the context."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.drafters.suffix import SuffixDrafter
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree

CONTEXTS = (1_000, 10_000, 100_000)
NODE_BUDGETS = (16, 32)


@dataclass(frozen=True)
class SuffixCost:
    """Microseconds per step: entering the tokens of the step before, and drafting a tree.

    `build_us` is per token, when the prompt is entered; `num_bytes` is the automaton's bound.
    `num_nodes` and `tokens_per_step` are means over the steps.
    """

    context: int
    node_budget: int
    median_us: float
    p99_us: float
    build_us: float
    num_bytes: int
    num_nodes: float
    tokens_per_step: float


def suffix_costs(
    token_ids: Sequence[int],
    *,
    contexts: Sequence[int] = CONTEXTS,
    node_budgets: Sequence[int] = NODE_BUDGETS,
    num_steps: int = 300,
) -> list[SuffixCost]:
    """Time steps of a request whose prompt are the first tokens and whose output are the next.

    Each step commits what of its tree agrees with the text and one token more. Contexts that leave
    no step are left out.

    Example: `suffix_costs(tokenizer.encode(text))[-1].median_us`.
    """
    return [
        _measure(token_ids, context, node_budget, num_steps)
        for context in contexts
        for node_budget in node_budgets
        if context < len(token_ids)
    ]


def _measure(
    token_ids: Sequence[int], context: int, node_budget: int, num_steps: int
) -> SuffixCost:
    drafter = SuffixDrafter()
    request = Request("r", tuple(token_ids[:context]), SamplingParams())
    drafter.admit(request)
    steps = [DecodeStep(request, node_budget)]
    started = time.perf_counter()
    while drafter.num_waiting(request):
        drafter.draft(steps)
    build_s = time.perf_counter() - started
    times: list[float] = []
    nodes: list[int] = []
    lengths: list[int] = []
    while len(times) < num_steps and request.num_tokens < len(token_ids):
        started = time.perf_counter()
        (tree,) = drafter.draft(steps)
        times.append(1e6 * (time.perf_counter() - started))
        rest = token_ids[request.num_tokens : request.num_tokens + node_budget + 1]
        length = _accepted_length(tree, rest) + 1
        request.token_ids += rest[:length]
        nodes.append(tree.num_nodes - 1)
        lengths.append(length)
    return SuffixCost(
        context=context,
        node_budget=node_budget,
        median_us=statistics.median(times),
        p99_us=statistics.quantiles(times, n=100)[-1] if len(times) > 1 else times[0],
        build_us=1e6 * build_s / context,
        num_bytes=drafter.text_bytes(request),
        num_nodes=statistics.mean(nodes),
        tokens_per_step=statistics.mean(lengths),
    )


def _accepted_length(tree: DraftTree, token_ids: Sequence[int]) -> int:
    """Nodes of the tree on the path of these tokens."""
    node = 0
    for length, token_id in enumerate(token_ids):
        child = tree.child_with(node, token_id)
        if child is None:
            return length
        node = child
    return len(token_ids)
