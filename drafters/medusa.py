"""MedusaDrafter: heads on the target's last hidden state guess several tokens ahead.

Cai et al. 2024, "Medusa: Simple LLM inference acceleration with multiple decoding heads". The heads
need no context of their own: the state that the last step left is all they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec import checkpoints
from specdec.drafters.draft_model import check_vocabulary, target_embedding, target_head
from specdec.drafters.growth import Growth
from specdec.drafters.medusa_choices import PUBLISHED, Choice, best_choices, worths
from specdec.drafters.medusa_heads import WEIGHTS_FILE, MedusaHeads
from specdec.drafters.packed_heads import HeadGuesses, PackedHeads
from specdec.drafters.pretrained.lookup import is_pretrained, pretrained
from specdec.drafting import DraftContext, Drafter
from specdec.errors import CheckpointError, UsageError
from specdec.limits import DEFAULT_NODE_BUDGET
from specdec.loading import LoadedModel
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree, TreeBuilder
from specdec.verification import Verdict

MAX_WIDTH = 12  # nodes of a level that get children, where probabilities choose
NUM_CHILDREN = 10  # of each; the published lists' TOPK too
BY_PROBABILITY, BY_RANKS = "probability", "ranks"
TREES = (BY_PROBABILITY, BY_RANKS, *PUBLISHED)
_UNMEASURED = tuple(0.6**rank for rank in range(1, NUM_CHILDREN + 1))


class MedusaDrafter(Drafter):
    """Drafts from Medusa heads, ours or published ones.

    `tree` chooses the nodes: `probability` takes those of the greatest estimated worth at each
    step, `ranks` those of the greatest acceptance measured in training, and a published list's name
    that list, cut to the node budget.

    Example: `--drafter medusa`, `--drafter medusa=FOLDER`, `--drafter medusa=FOLDER@mc_sim_7b_63`.
    """

    name = "medusa"
    needs_hidden = True

    def __init__(
        self,
        heads: PackedHeads,
        tree: str = BY_PROBABILITY,
        ranks: Sequence[Sequence[float]] = (),
    ) -> None:
        self.num_bytes = heads.num_bytes
        self._heads = heads
        self._ranks = ranks or (_UNMEASURED,) * heads.num_heads
        self.worths = worths(ranks, DEFAULT_NODE_BUDGET) if ranks else None
        self._choices: tuple[Choice, ...] | None = PUBLISHED.get(tree)
        self._is_by_ranks = tree == BY_RANKS
        self._states: dict[str, Tensor] = {}  # of the token before the root, by request

    @classmethod
    def suits(cls, target: LoadedModel) -> bool:
        """Where heads for it come with the project."""
        return is_pretrained(target.name, cls.name)

    @classmethod
    def load(cls, context: DraftContext) -> MedusaDrafter:
        """The checkpoint that was named, or the one that comes with the target."""
        where, _, tree = (context.checkpoint or "").partition("@")
        tree = tree or BY_PROBABILITY
        if tree not in TREES:
            raise UsageError(f"unknown tree {tree!r} of medusa; choose from {', '.join(TREES)}")
        target = context.target
        folder = checkpoints.resolve(where) if where else pretrained(target, cls.name)
        heads = MedusaHeads.load(folder)
        if tree == BY_RANKS and not checkpoints.load_config(folder).get("ranks"):
            raise UsageError(f"{folder}/config.json has no ranks; choose another tree than ranks")
        _check(
            folder / WEIGHTS_FILE,
            heads,
            target.model.config.hidden_size,
            target.model.config.vocab_size,
        )
        packed = PackedHeads(heads, target.model, target_embedding(target), target_head(target))
        return cls(packed, tree, _measured_ranks(folder, heads.num_heads))

    def observe(self, request: Request, verdict: Verdict, hidden: Tensor | None) -> None:
        """Keep the state that chose the bonus token, which is the next root."""
        if hidden is not None:
            self._states[request.request_id] = hidden[-1].to("cpu", copy=True)

    def release(self, request: Request) -> None:
        """Drop its state."""
        self._states.pop(request.request_id, None)

    @torch.inference_mode()
    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """One product for all heads of all requests, then a tree each."""
        trees = [DraftTree.root_only(step.root) for step in steps]
        ready = [
            index
            for index, step in enumerate(steps)
            if step.node_budget > 0 and step.request.request_id in self._states
        ]
        if not ready:
            return trees
        requests = [steps[index].request for index in ready]
        states = torch.stack([self._states[request.request_id] for request in requests])
        roots = torch.tensor([steps[index].root for index in ready])
        guessed = self._heads.guess(states, roots, requests, uses_noise=self.uses_noise)
        for index, guesses in zip(ready, guessed, strict=True):
            trees[index] = self._tree(steps[index], guesses)
        return trees

    def _tree(self, step: DecodeStep, guesses: HeadGuesses) -> DraftTree:
        choices = self._choices
        if self._is_by_ranks:
            choices = best_choices(self._ranks, step.node_budget)
        if choices is not None:
            return self._chosen(step, guesses, choices[: step.node_budget])
        growth = Growth(step.root, step.node_budget, step.max_depth)
        for head in range(self._heads.num_heads):
            nodes = growth.frontier(MAX_WIDTH)
            if not nodes:
                break
            parents = [growth.token_ids[node] for node in nodes]
            for node, found in zip(
                nodes, guesses.children(head, parents, NUM_CHILDREN), strict=True
            ):
                growth.extend(node, found.token_ids, found.scores)
        return growth.tree(self.name)

    def _chosen(
        self, step: DecodeStep, guesses: HeadGuesses, choices: Sequence[Choice]
    ) -> DraftTree:
        """The nodes of a list: choice (0, 2) is the third guess below the first guess."""
        builder = TreeBuilder(step.root, step.node_budget)
        nodes: dict[Choice, int] = {(): 0}
        token_of: dict[Choice, int] = {(): step.root}
        for head in range(self._heads.num_heads):
            level = [
                choice for choice in choices if len(choice) == head + 1 and choice[:-1] in nodes
            ]
            if not level:
                break
            parents = sorted({choice[:-1] for choice in level})
            found = guesses.children(head, [token_of[p] for p in parents], NUM_CHILDREN)
            ranked = dict(zip(parents, found, strict=True))
            for choice in level:
                guessed, rank = ranked[choice[:-1]].token_ids, choice[-1]
                if rank < len(guessed):
                    score = self._ranks[head][rank] if rank < len(self._ranks[head]) else 0.0
                    node = builder.add(nodes[choice[:-1]], guessed[rank], score, self.name)
                    assert node is not None
                    nodes[choice], token_of[choice] = node, guessed[rank]
        return builder.build()


def _check(file: Path, heads: MedusaHeads, hidden_size: int, vocab_size: int) -> None:
    found = heads.layers.shape[-1]
    if found != hidden_size:
        raise CheckpointError(
            f"{file}: tensor 0.0.linear.weight has shape [{found}, {found}], expected"
            f" [{hidden_size}, {hidden_size}]; are these heads for this model?"
        )
    if heads.vocabulary is not None:
        check_vocabulary(file, heads.vocabulary, vocab_size)
    elif heads.projections is not None and heads.projections.shape[1] > vocab_size:
        raise CheckpointError(
            f"{file}: the heads know {heads.projections.shape[1]} tokens, the target"
            f" {vocab_size}; are these heads for this model?"
        )


def _measured_ranks(folder: Path, num_heads: int) -> Sequence[Sequence[float]]:
    """Acceptance by head and rank that training measured, or nothing."""
    ranks = checkpoints.load_config(folder).get("ranks", [])
    try:
        measured = [[float(share) for share in head] for head in ranks]
    except (TypeError, ValueError):
        raise CheckpointError(f"{folder}/config.json: ranks must be lists of numbers") from None
    if measured and len(measured) != num_heads:
        raise CheckpointError(
            f"{folder}/config.json: ranks of {len(measured)} heads, expected {num_heads}"
        )
    return measured
