"""Verification: from a draft tree and the target's logits to a verdict. Pure.

coupled (default, lossless): y = argmax(log p_target + Gumbel noise keyed by seed, position and
token id); go to the child that carries y, stop where there is none. The output does not depend on
the tree (Daliri et al. 2024, arXiv:2408.07978).
rejection (lossless): Leviathan et al. 2022, Chen et al. 2023; siblings in order, without
replacement: accept with p/q, else p <- norm(max(p - q, 0)) and q <- norm(q without the sibling).
typical (LOSSY): Cai et al. 2024 (Medusa): accept where p > min(eps, alpha * exp(-entropy)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.config import Verification
from specdec.noise import coin, gumbel_all
from specdec.request import TokenRecord
from specdec.sampling import NothingToChoose, Sampler, raw_log_probs
from specdec.tree import ROOT_SOURCE, DraftTree

TYPICAL_EPSILON, TYPICAL_ALPHA = 0.09, 0.3  # posterior threshold and alpha of the Medusa paper


@dataclass(frozen=True)
class Verdict:
    """The accepted path and the bonus token.

    `path` are the accepted nodes, root excluded, depth 1 first; `token_ids` their tokens and then
    the bonus token, so `len(token_ids) == accepted length + 1`. `rows[i]` is the node whose logits
    decided `token_ids[i]`.
    """

    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    sources: tuple[tuple[str, ...], ...]

    @property
    def accepted_length(self) -> int:
        return len(self.path)

    @property
    def rows(self) -> tuple[int, ...]:
        return (0, *self.path)


NO_VERDICT = Verdict((), (), ())  # where there was nothing to verify

NextNode = Callable[[DraftTree, int, Tensor, Sampler, Sequence[int]], tuple[int | None, int]]


def verify(
    rule: Verification,
    tree: DraftTree,
    logits: Tensor,
    sampler: Sampler,
    output_ids: Sequence[int],
) -> Verdict:
    """Walk the tree from the root until no child carries the chosen token.

    logits: [num_nodes, vocab], raw target logits per node. output_ids: the request's output so
    far, the root included. Each node is judged with its own path as history.

    Raises NothingToChoose where the request bans every token after the root. Where it does so
    after a deeper node, that node's token is the last one, as it would be without drafts.

    Example: `verify("coupled", DraftTree.root_only(5), logits, sampler, [5])` is plain decoding.
    """
    step = _RULES[rule]
    path: list[int] = []
    chosen: list[int] = []
    node = 0
    while True:
        try:
            child, token_id = step(tree, node, logits[node], sampler, [*output_ids, *chosen])
        except NothingToChoose:
            if not path:
                raise
            path.pop()
            child = None
        else:
            chosen.append(token_id)
        if child is None:
            sources = (*(tree.sources[n] for n in path), (ROOT_SOURCE,))
            return Verdict(tuple(path), tuple(chosen), sources)
        path.append(child)
        node = child


def records(
    verdict: Verdict, logits: Tensor, *, step: int, num_logprobs: int | None
) -> list[TokenRecord]:
    """The verdict's tokens with their provenance and, if asked for, their log-probabilities."""
    out = []
    for index, (row, token_id) in enumerate(zip(verdict.rows, verdict.token_ids, strict=True)):
        sources = verdict.sources[index]
        if num_logprobs is None:
            out.append(TokenRecord(token_id, sources, index + 1, step))
        else:
            logprob, top = raw_log_probs(logits[row], token_id, num_logprobs)
            out.append(TokenRecord(token_id, sources, index + 1, step, logprob, tuple(top)))
    return out


def _coupled(
    tree: DraftTree, node: int, logits: Tensor, sampler: Sampler, output_ids: Sequence[int]
) -> tuple[int | None, int]:
    token_id = sampler.choose(logits, output_ids)
    return tree.child_with(node, token_id), token_id


def _rejection(
    tree: DraftTree, node: int, logits: Tensor, sampler: Sampler, output_ids: Sequence[int]
) -> tuple[int | None, int]:
    p_target = sampler.survivors(logits, output_ids).dense(len(logits))
    p_draft = None if tree.draft_probs is None else tree.draft_probs[node].double()
    position = sampler.position(output_ids)
    for index, child in enumerate(tree.children[node]):
        token_id = tree.token_ids[child]
        if p_draft is None:
            point = torch.zeros_like(p_target)
            point[token_id] = 1.0
        else:
            point = p_draft
        if coin(sampler.seed, position, index) * point[token_id] < p_target[token_id]:
            return child, token_id
        residual = (p_target - point).clamp_min(0.0)
        if residual.sum() > 0:  # empty only where p and q differ by rounding
            p_target = _normalised(residual)
        if p_draft is not None:
            p_draft = p_draft.clone()
            p_draft[token_id] = 0.0
            p_draft = _normalised(p_draft)
    return None, _draw(p_target, sampler, position)


def _typical(
    tree: DraftTree, node: int, logits: Tensor, sampler: Sampler, output_ids: Sequence[int]
) -> tuple[int | None, int]:
    p_target = sampler.survivors(logits, output_ids).dense(len(logits))
    entropy = float(torch.special.entr(p_target).sum())
    threshold = min(TYPICAL_EPSILON, TYPICAL_ALPHA * math.exp(-entropy))
    children = tree.children[node]
    likeliest = max(children, key=lambda c: float(p_target[tree.token_ids[c]]), default=None)
    if likeliest is not None and p_target[tree.token_ids[likeliest]] > threshold:
        return likeliest, tree.token_ids[likeliest]
    return None, _draw(p_target, sampler, sampler.position(output_ids))


def _normalised(probs: Tensor) -> Tensor:
    total = probs.sum()
    return probs / total if total > 0 else probs


def _draw(probs: Tensor, sampler: Sampler, position: int) -> int:
    noise = gumbel_all(sampler.seed, position, len(probs), probs.device)
    return int((probs.log() + noise).argmax())


_RULES: Mapping[Verification, NextNode] = {
    "coupled": _coupled,
    "rejection": _rejection,
    "typical": _typical,
}
