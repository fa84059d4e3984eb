"""Acceptance: how often guesses would have been right, on sequences kept from training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.drafters.training.projection import NUM_RANKS

TOP = (1, 2, 4, 8)
KINDS = ("greedy", "sampled")


@dataclass
class AcceptanceCounts:
    """Counts per head of the rank that the true next token had, given the true parent."""

    ranks: Tensor  # int64 [num_heads, NUM_RANKS + 1]; the last column: not among the guesses
    chain_length: int = 0  # sum over chains of the guesses that were right from the first on
    chains: int = 0

    @classmethod
    def of(cls, num_heads: int) -> AcceptanceCounts:
        """Counts of nothing."""
        return cls(torch.zeros(num_heads, NUM_RANKS + 1, dtype=torch.int64))

    def add(self, ranks: Tensor, is_valid: Tensor) -> None:
        """Count one sequence. ranks: int64 [num_heads, n]; is_valid: bool, the same shape."""
        for head, (own, valid) in enumerate(zip(ranks, is_valid, strict=True)):
            self.ranks[head] += torch.bincount(own[valid], minlength=NUM_RANKS + 1)

    def add_chains(self, is_right: Tensor) -> None:
        """Count chains, bool [depth, n]: whether each one's guess at each depth was right."""
        self.chain_length += int(is_right.long().cumprod(0).sum())
        self.chains += is_right.shape[1]

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        return AcceptanceCounts(
            self.ranks + other.ranks,
            self.chain_length + other.chain_length,
            self.chains + other.chains,
        )

    @property
    def accepted_length(self) -> float:
        """Mean accepted length of a chain of the heads' best guesses."""
        return self.chain_length / max(1, self.chains)

    def rank_table(self) -> list[list[float]]:
        """[head][rank] share of positions whose true token had that rank."""
        totals = self.ranks.sum(1, keepdim=True).clamp_min(1)
        shares: list[list[float]] = (self.ranks[:, :NUM_RANKS] / totals).tolist()
        return [[round(share, 5) for share in head] for head in shares]

    def report(self) -> dict[str, Any]:
        """Accuracies per head and the chain's accepted length, for JSON."""
        table = self.rank_table()
        return {
            **{f"top_{k}": [round(sum(head[:k]), 5) for head in table] for k in TOP},
            "accepted_length": round(self.accepted_length, 5),
            "num_positions": int(self.ranks[0].sum()),
        }


def kind_of(temperature: float) -> str:
    """Which of KINDS a sequence of this temperature counts to."""
    return "greedy" if temperature == 0 else "sampled"


def summary(counts: Mapping[str, AcceptanceCounts]) -> dict[str, Any]:
    """Report of counts per kind and together; `ranks` are what a tree is built from."""
    both = counts["greedy"] + counts["sampled"]
    return {
        "accepted_length": round(both.accepted_length, 5),
        "ranks": both.rank_table(),
        **{f"ranks_{kind}": counts[kind].rank_table() for kind in KINDS},
        **{kind: counts[kind].report() for kind in KINDS},
    }


def render(report: Mapping[str, Any]) -> str:
    """A few lines for a terminal."""
    lines = []
    for kind in KINDS:
        own = report[kind]
        if not own["num_positions"]:
            continue
        length = own["accepted_length"]
        lines.append(f"{kind}: a chain is accepted for {length:.2f} tokens on average")
        for head in range(len(own["top_1"])):
            shares = "  ".join(f"top {k} {100 * own[f'top_{k}'][head]:5.1f} %" for k in TOP)
            lines.append(f"  head {head}  {shares}")
    return "\n".join(lines)
