"""SimulatedAnswer: what a drafter gains where the answer is known beforehand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.drafters.prediction import PredictionDrafter
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree

FOREIGN = 10_000  # from here on: tokens that stand in no predicted text


def request(prediction_ids: Sequence[int], name: str = "r") -> Request:
    return Request(name, (1,), SamplingParams(), prediction_ids=tuple(prediction_ids))


def draft(drafter: PredictionDrafter, req: Request, node_budget: int) -> DraftTree:
    (tree,) = drafter.draft([DecodeStep(req, node_budget)])
    assert tree.token_ids[0] == req.token_ids[-1]
    assert tree.num_nodes <= 1 + node_budget
    return tree


def first_path(tree: DraftTree) -> list[int]:
    """Tokens of the path of first children, which is the likeliest."""
    tokens, node = [], 0
    while tree.children[node]:
        node = tree.children[node][0]
        tokens.append(tree.token_ids[node])
    return tokens


def accept(tree: DraftTree, answer: Sequence[int]) -> list[int]:
    """What a target that writes `answer` makes of a tree: the accepted tokens and the bonus."""
    kept: list[int] = []
    node: int | None = 0
    while node is not None and len(kept) < len(answer):
        kept.append(answer[len(kept)])
        node = tree.child_with(node, kept[-1])
    return kept


@dataclass(frozen=True)
class Run:
    """A simulated answer: its length, its steps, and what the steps drafted."""

    num_tokens: int
    steps: tuple[int, ...]  # tokens of each
    num_nodes: int

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / len(self.steps)


def simulate(prediction: Sequence[int], answer: Sequence[int], node_budget: int) -> Run:
    """The steps of a target that writes `answer`, whatever is drafted."""
    drafter, req = PredictionDrafter(), request(prediction)
    steps: list[int] = []
    num_nodes = 0
    while sum(steps) < len(answer):
        tree = draft(drafter, req, node_budget)
        kept = accept(tree, answer[sum(steps) :])
        req.token_ids += kept
        steps.append(len(kept))
        num_nodes += tree.num_nodes - 1
    return Run(len(answer), tuple(steps), num_nodes)


def as_tokens(text: str, ids: dict[str, int]) -> list[int]:
    """A plain tokenizer: words with the space before them, line starts, and signs."""
    pieces = re.findall(r"\n *| ?\w+|.", text)
    return [ids.setdefault(piece, len(ids)) for piece in pieces]
