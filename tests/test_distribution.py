"""Lossless rules emit the target's distribution: by exact enumeration and by statistics.

The code under test is run with its noise and coins scripted, until every decision it can take is
known: which coins accept (found by bisection, so that no formula is repeated here) and which row
of scores each Gumbel draw was added to. That decision tree gives the exact law of the
first tokens; followed with the real noise of many seeds at once it gives 200,000 draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from specdec import sampling, verification
from specdec.config import Verification
from specdec.noise import COIN_STREAM, GUMBEL_STREAM, gumbel_of_words, philox
from specdec.params import SamplingParams
from specdec.sampling import Sampler
from specdec.tree import DraftTree
from specdec.verification import verify

VOCAB, LENGTH, PROMPT = 4, 3, (1,)
DRAWS = 200_000
TokenIds = tuple[int, ...]
Generate = Callable[[int], TokenIds]
Law = dict[TokenIds, float]


@cache
def row(path: TokenIds) -> Tensor:
    """The toy target: logits after a path, explicit and unlike for every path."""
    seed = sum((token + 1) * (VOCAB + 1) ** i for i, token in enumerate(path))
    return 1.3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def target_law(params: SamplingParams) -> Law:
    """Joint distribution of the first LENGTH tokens, in plain Python."""

    def conditional(path: TokenIds) -> list[float]:
        weights = [math.exp(score / params.temperature) for score in row(path).tolist()]
        order = sorted(range(VOCAB), key=lambda token: -weights[token])
        order = order[: params.top_k or VOCAB]
        total, mass, kept = sum(weights[t] for t in order), 0.0, []
        for token in order:
            kept += [token] if mass < params.top_p else []
            mass += weights[token] / total
        total = sum(weights[t] for t in kept)
        return [weights[t] / total if t in kept else 0.0 for t in range(VOCAB)]

    return {
        path: math.prod(conditional(path[:i])[path[i]] for i in range(LENGTH))
        for path in itertools.product(range(VOCAB), repeat=LENGTH)
    }


def generation(
    rule: Verification, params: SamplingParams, tree_for: Callable[[TokenIds], DraftTree]
) -> Generate:
    """Speculative generation of LENGTH tokens, step by step."""

    def generate(seed: int) -> TokenIds:
        sampler = Sampler(params, PROMPT, seed=seed, eos_token_ids=())
        output: list[int] = []
        while len(output) < LENGTH:
            tree = tree_for(tuple(output))
            paths = [[tree.token_ids[n] for n in tree.path(i)[1:]] for i in range(tree.num_nodes)]
            logits = torch.stack([row((*output, *path)) for path in paths])
            output += verify(rule, tree, logits, sampler, output).token_ids
        return tuple(output[:LENGTH])

    return generate


@dataclass(frozen=True)
class CoinFlip:
    position: int
    index: int
    threshold: float  # coins below it go to `low`
    low: Decision
    high: Decision


@dataclass(frozen=True)
class GumbelDraw:
    position: int
    token_ids: TokenIds
    log_probs: Tensor
    then: tuple[Decision | None, ...]  # by winner; None = banned


Decision = CoinFlip | GumbelDraw | TokenIds


class Undecided(Exception):
    """The run asked for randomness that is not scripted yet."""

    def __init__(self, key: tuple[Any, ...], log_probs: Tensor | None = None) -> None:
        super().__init__(key)
        self.key, self.log_probs = key, log_probs


class Noise:
    """Stands for Gumbel noise; learns the row it is added to and makes the scripted token win."""

    def __init__(self, scripts: Explorer, position: int, token_ids: TokenIds) -> None:
        self.scripts, self.key = scripts, ("noise", position, token_ids)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        log_probs, noise = args
        bump = torch.zeros(len(log_probs), dtype=torch.float64)
        bump[noise.scripts.look_up(noise.key, log_probs)] = 1e6
        return bump + log_probs


class Explorer:
    """Finds the decision tree of a generation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, generate: Generate) -> None:
        self._patch, self._generate = monkeypatch, generate
        self._script: dict[tuple[Any, ...], Any] = {}
        self._used: set[tuple[Any, ...]] = set()

    def decisions(self) -> Decision:
        with self._patch.context() as patch:
            for module in (sampling, verification):
                patch.setattr(
                    module, "gumbel_all", lambda _, p, n, device: Noise(self, p, tuple(range(n)))
                )
            patch.setattr("specdec.noise._native", None)  # which would draw its own noise
            patch.setattr(sampling, "gumbel", lambda _, p, ids: Noise(self, p, tuple(ids.tolist())))
            patch.setattr(verification, "coin", lambda _, p, i: self.look_up(("coin", p, i)))
            return self._explore()

    def look_up(self, key: tuple[Any, ...], log_probs: Tensor | None = None) -> Any:
        assert key[:2] not in self._used or key[0] == "coin", "noise of a position used twice"
        assert key not in self._used, "coin used twice"
        self._used |= {key, key[:2]}
        if key not in self._script:
            raise Undecided(key, log_probs)
        return self._script[key]

    def _attempt(self) -> TokenIds | Undecided:
        self._used.clear()
        try:
            return self._generate(0)
        except Undecided as undecided:
            return undecided

    def _explore(self) -> Decision:
        outcome = self._attempt()
        if not isinstance(outcome, Undecided):
            return outcome
        key, log_probs = outcome.key, outcome.log_probs
        if log_probs is not None:
            finite = log_probs.isfinite().tolist()
            then = tuple(self._after(key, i) if ok else None for i, ok in enumerate(finite))
            return GumbelDraw(key[1], key[2], log_probs, then)
        low, high = 1e-12, 1 - 1e-12
        if (first := self._sign(key, low)) == self._sign(key, high):
            return self._after(key, 0.5)
        while high - low > 1e-8:
            middle = (low + high) / 2
            low, high = (middle, high) if self._sign(key, middle) == first else (low, middle)
        return CoinFlip(key[1], key[2], low, self._after(key, low / 2), self._after(key, 1 - 1e-12))

    def _after(self, key: tuple[Any, ...], value: float) -> Decision:
        self._script[key] = value
        result = self._explore()
        del self._script[key]
        return result

    def _sign(self, key: tuple[Any, ...], value: float) -> object:
        """What follows a coin of this value: the next question, or the tokens."""
        self._script[key] = value
        outcome = self._attempt()
        del self._script[key]
        return getattr(outcome, "key", outcome)


@cache
def win_probability(log_probs: tuple[float, ...], index: int) -> float:
    """P(argmax(log_probs + Gumbel) = index), by quadrature over the winner's own noise."""
    ratios = sum(math.exp(other - log_probs[index]) for other in log_probs) - 1.0
    # With u = exp(-exp(-noise)) uniform, the others stay below with probability u ** ratios.
    return float(integrate.quad(lambda u: u**ratios, 0.0, 1.0, epsabs=1e-10, epsrel=1e-10)[0])


def law_of(decision: Decision, weight: float = 1.0) -> Iterator[tuple[TokenIds, float]]:
    if isinstance(decision, CoinFlip):
        yield from law_of(decision.low, weight * decision.threshold)
        yield from law_of(decision.high, weight * (1 - decision.threshold))
    elif isinstance(decision, GumbelDraw):
        scores = tuple(decision.log_probs.tolist())
        for index, then in enumerate(decision.then):
            if then is not None:
                yield from law_of(then, weight * win_probability(scores, index))
    else:
        yield decision, weight


def words_of(seeds: Tensor, position: int, stream: int, index: int) -> Tensor:
    """Random words of many seeds at one counter, int64 [n, 4]."""
    counter = (torch.full_like(seeds, index), position, stream, 0)
    return philox(counter, seeds)  # type: ignore[arg-type]  # a tensor of seeds broadcasts


def draws_of(decision: Decision, seeds: Tensor) -> Iterator[tuple[TokenIds, Tensor]]:
    """Follow the decisions with the real noise and coins of many seeds at once."""
    if isinstance(decision, CoinFlip):
        words = words_of(seeds, decision.position, COIN_STREAM, decision.index)[:, 0]
        is_low = (words + 0.5) * 2.0**-32 < decision.threshold
        yield from draws_of(decision.low, seeds[is_low])
        yield from draws_of(decision.high, seeds[~is_low])
    elif isinstance(decision, GumbelDraw):
        words = words_of(seeds, decision.position, GUMBEL_STREAM, 0)  # all of the vocabulary's 4
        noise = gumbel_of_words(words)[:, list(decision.token_ids)]
        winners = (decision.log_probs + noise).argmax(1)
        for index, then in enumerate(decision.then):
            if then is not None:
                yield from draws_of(then, seeds[winners == index])
    else:
        yield decision, seeds


def total(parts: Iterable[tuple[TokenIds, float]]) -> Law:
    law: Law = {}
    for path, weight in parts:
        law[path] = law.get(path, 0.0) + weight
    return law


def distance(got: Law, want: Law) -> float:
    return max(abs(got.get(path, 0.0) - want.get(path, 0.0)) for path in got.keys() | want.keys())


def chain_and_branches(prefix: TokenIds) -> DraftTree:
    """Point masses: siblings at two depths for the first step, one guess for the others."""
    paths = [[2, 0], [1, 3], [2, 3]] if not prefix else [[0]]
    return DraftTree.from_paths(0, paths, source="toy", node_budget=9)


def wide(prefix: TokenIds) -> DraftTree:
    """Every token but one, the unlikeliest order first."""
    paths = row(prefix).argsort()[:3, None].tolist()
    return DraftTree.from_paths(0, paths, source="toy", node_budget=9)


def sampled_trees() -> Iterator[tuple[float, Callable[[TokenIds], DraftTree]]]:
    """All trees drawn without replacement from draft probabilities, with their probabilities: two
    children below the root and one below the second of them."""
    q = torch.softmax(torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(7)), dim=1)
    assert (row(()).softmax(0) > q[0]).sum() == 2  # more than one token can follow a rejection
    for a, b in itertools.permutations(range(VOCAB), 2):
        for c in range(VOCAB):
            probs = torch.stack((q[0], q[1], q[2], torch.zeros(VOCAB)))
            tree = DraftTree((0, a, b, c), (-1, 0, 0, 2), (1.0,) * 4, (("toy",),) * 4, probs)
            yield (
                float(q[0, a] * q[0, b] / (1 - q[0, a]) * q[2, c]),
                lambda prefix, t=tree: DraftTree.root_only(0) if prefix else t,  # type: ignore[misc]  # mypy sees no type in a lambda's default
            )


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.4, top_p=0.8),
]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("tree_for", [chain_and_branches, wide])
@pytest.mark.parametrize("params", PARAMS)
def test_point_masses(
    rule: Verification,
    tree_for: Callable[[TokenIds], DraftTree],
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generate = generation(rule, params, tree_for)
    decisions = Explorer(monkeypatch, generate).decisions()
    want = target_law(params)
    assert distance(total(law_of(decisions)), want) < 1e-6
    parts = list(draws_of(decisions, torch.arange(DRAWS)))
    for path, seeds in parts:  # the real code, on some seeds of every outcome
        assert all(generate(seed) == path for seed in seeds[:3].tolist())
    check_draws(total((path, len(seeds)) for path, seeds in parts), want)


def check_draws(counts: Law, want: Law) -> None:
    cells = [path for path, prob in want.items() if prob > 0]
    assert sum(counts.values()) == DRAWS and counts.keys() <= set(cells)
    seen = [counts.get(path, 0) for path in cells]
    expected = [want[path] * DRAWS for path in cells]
    assert stats.chisquare(seen, expected).pvalue > 1e-4
    variation = sum(abs(s - e) for s, e in zip(seen, expected, strict=True)) / (2 * DRAWS)
    assert variation < 3 * math.sqrt(len(cells) / (2 * math.pi * DRAWS))


@pytest.mark.parametrize("params", PARAMS[:2])
def test_sampled_drafts(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    law: list[tuple[TokenIds, float]] = []
    counts: list[tuple[TokenIds, float]] = []
    trees = list(sampled_trees())
    weights = torch.tensor([weight for weight, _ in trees], dtype=torch.float64)
    picks = weights.multinomial(DRAWS, True, generator=torch.Generator().manual_seed(1))
    for index, (weight, tree_for) in enumerate(trees):
        generate = generation("rejection", params, tree_for)
        decisions = Explorer(monkeypatch, generate).decisions()
        law += [(path, weight * part) for path, part in law_of(decisions)]
        for path, seeds in draws_of(decisions, (picks == index).nonzero()[:, 0]):
            counts.append((path, len(seeds)))
            assert all(generate(seed) == path for seed in seeds[:1].tolist())
    assert distance(total(law), target_law(params)) < 1e-6
    check_draws(total(counts), target_law(params))


def no_residual(
    tree: DraftTree, node: int, logits: Tensor, sampler: Sampler, output_ids: Sequence[int]
) -> tuple[int | None, int]:
    """Wrong: after a rejection it draws from p instead of max(p - q, 0)."""
    p_target = sampler.survivors(logits, output_ids).dense(len(logits))
    child, token_id = verification._rejection(tree, node, logits, sampler, output_ids)
    if child is None:  # with other noise, as that of this position is spent
        token_id = verification._draw(p_target, sampler, sampler.position(output_ids) + 1000)
    return child, token_id


@pytest.mark.parametrize("wrong", [no_residual, verification._typical])
def test_a_biased_rule_fails_both_checks(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verification._RULES, "rejection", wrong)
    want = target_law(PARAMS[0])
    tree = wide(())
    generate = generation("rejection", PARAMS[0], lambda p: DraftTree.root_only(0) if p else tree)
    decisions = Explorer(monkeypatch, generate).decisions()
    assert distance(total(law_of(decisions)), want) > 1e-2
    counts = total((path, len(seeds)) for path, seeds in draws_of(decisions, torch.arange(DRAWS)))
    with pytest.raises(AssertionError):
        check_draws(counts, want)
