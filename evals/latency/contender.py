"""Contender: one way to answer a prompt greedily with so many tokens, ours or a peer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.generation import generate
from specdec.params import SamplingParams


@dataclass(frozen=True)
class Run:
    """One answer and the seconds from submission to its end, prompt included."""

    token_ids: tuple[int, ...]
    total_s: float
    tokens_per_step: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.total_s


# Answers a prompt with exactly this many tokens; an end token is one like any other.
Contender = Callable[[Sequence[int], int], Run]


def ours(engine: Engine) -> Contender:
    """An engine as a contender."""

    def run(prompt_ids: Sequence[int], num_tokens: int) -> Run:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        result = generate(engine, prompt_ids, params)
        return Run(result.token_ids, result.total_s, result.stats.tokens_per_step)

    return run


def checked(name: str, contender: Contender) -> Contender:
    """The contender, held to its promise: SpecdecError for another number of tokens."""

    def run(prompt_ids: Sequence[int], num_tokens: int) -> Run:
        result = contender(prompt_ids, num_tokens)
        if len(result.token_ids) != num_tokens:
            raise SpecdecError(
                f"{name} answered with {len(result.token_ids)} tokens instead of {num_tokens}: "
                "it cannot be compared"
            )
        return result

    return run


def num_equal(token_ids: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first difference; other sums in other precisions part sooner or later."""
    pairs = enumerate(zip(token_ids, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(token_ids), len(other)))
