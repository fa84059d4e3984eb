"""Population: virtual requests that come and go, with a truth that no policy sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, count

import numpy as np

from specdec.evals.simulation.simulated_drafter import (
    POSITIONS,
    TOKENS_PER_POSITION,
    Floats,
    Guesses,
    Honesty,
    SimulatedDrafter,
)
from specdec.limits import MAX_NODE_BUDGET
from specdec.params import SamplingParams
from specdec.request import Request
from specdec.tree import ROOT_SOURCE, DraftTree
from specdec.verification import Verdict

ROOT_TOKEN = 1  # what every prompt consists of


@dataclass(frozen=True)
class Kind:
    """Requests that are alike: the ease of their positions is drawn from Beta(alpha, beta).

    Ease is the chance that a drafter of quality 1 guesses the position's token; alpha = 0 means
    that it never does, beta = 0 that it always does. `turn` is the share of the output after which
    ease and 1 - ease change places.
    """

    share: float = 1.0
    alpha: float = 2.0
    beta: float = 2.0
    turn: float = 1.0

    def ease(self, length: int, draw: np.random.Generator) -> Floats:
        """[length + deepest tree] ease by position of the output."""
        size = length + MAX_NODE_BUDGET
        if not (self.alpha and self.beta):
            ease = np.full(size, float(self.beta == 0))
        else:
            ease = draw.beta(self.alpha, self.beta, size)
        turn = int(self.turn * length) if self.turn < 1 else size
        ease[turn:] = 1.0 - ease[turn:]
        return ease


@dataclass(frozen=True)
class Phase:
    """So many requests at once, until `num_tokens` more are generated or for `num_steps` steps.

    `usefulness` multiplies the true chance of every guess. The clock of a comparison is tokens:
    then every policy does the same work; steps are for looking at what follows a change.
    """

    concurrency: int
    num_tokens: int | None = None
    num_steps: int | None = None
    usefulness: float = 1.0

    def __post_init__(self) -> None:
        assert (self.num_tokens is None) != (self.num_steps is None)


@dataclass(frozen=True)
class Population:
    """Requests of several kinds, the drafters that guess for them, and how many there are when.

    Outputs have between half and one and a half times `length` tokens.

    Example: `chat().at(16, num_tokens=4000)`.
    """

    name: str
    drafters: tuple[SimulatedDrafter, ...]
    kinds: tuple[Kind, ...]
    phases: tuple[Phase, ...] = ()
    length: int = 256
    context: int = 512

    def at(self, concurrency: int, num_tokens: int) -> Population:
        """The same requests, so many at once until so many tokens are generated."""
        return replace(self, phases=(Phase(concurrency, num_tokens),))

    def through(self, *phases: Phase) -> Population:
        """The same requests through these phases."""
        return replace(self, phases=phases)

    @property
    def drafter_names(self) -> tuple[str, ...]:
        return tuple(drafter.name for drafter in self.drafters)


@dataclass(frozen=True)
class Truth:
    """What is fixed of a request before anybody serves it: lengths in tokens, and all guesses.

    All draws are keyed by (seed, number of the request, drafter) and laid out by position.
    """

    length: int
    context: int
    guesses: tuple[Guesses, ...]

    @staticmethod
    @lru_cache(2**10)  # policies that are compared meet the same requests
    def of(population: Population, number: int, seed: int) -> Truth:
        """Of request `number`; its phases have no say."""
        draw = np.random.default_rng([seed, number])
        kinds = population.kinds
        shares = list(accumulate(kind.share for kind in kinds))
        kind = kinds[int(np.searchsorted(shares, draw.random() * shares[-1], side="right"))]
        length = max(1, int(population.length * draw.uniform(0.5, 1.5)))
        context = max(1, int(population.context * draw.uniform(0.5, 1.5)))
        ease = kind.ease(length, draw)
        guesses = tuple(
            Guesses(drafter, index, ease, np.random.default_rng([seed, number, 1 + index]))
            for index, drafter in enumerate(population.drafters)
        )
        return Truth(length, context, guesses)


class VirtualRequest:
    """A request with its true continuation; the same for every policy."""

    def __init__(self, population: Population, number: int, seed: int) -> None:
        truth = Truth.of(replace(population, phases=()), number, seed)
        self.request = Request(
            f"request-{number}",
            (ROOT_TOKEN,) * truth.context,
            SamplingParams(max_tokens=truth.length, ignore_eos=True, seed=number),
        )
        self._guesses = truth.guesses

    def draft(self, drafter: int, depth: int, node_budget: int, usefulness: float) -> DraftTree:
        """The tree of this drafter behind the present root; only the root without a guess."""
        root = self.request.token_ids[-1]
        position = len(self.request.output)
        tree = self._guesses[drafter].tree(root, position, depth, node_budget, usefulness)
        return tree or DraftTree.root_only(root)

    def verify(self, tree: DraftTree) -> Verdict:
        """Walk down the children that carry the true tokens; the next true token is the bonus."""
        position = len(self.request.output)
        path = tree.path_of(map(true_token, count(position)))
        tokens = tuple(map(true_token, range(position, position + len(path) + 1)))
        sources = (*(tree.sources[node] for node in path), (ROOT_SOURCE,))
        return Verdict(tuple(path), tokens, sources)


def true_token(position: int) -> int:
    """The token at this position of every output."""
    return position % POSITIONS * TOKENS_PER_POSITION


SUFFIX = SimulatedDrafter("suffix", max_depth=16, call_s=1e-5, request_s=2e-5)
HEADS = SimulatedDrafter("heads", width=3, decay=0.9, max_depth=5, call_s=8e-4, request_s=2e-5)
SMALL_MODEL = SimulatedDrafter("small-model", max_depth=10, request_s=1e-5, level_s=4e-4)


def chat(honesty: Honesty = "calibrated") -> Population:
    """Chains that are right now and then; scores tell when, as `honesty` says."""
    drafter = replace(SUFFIX, max_depth=8, quality=0.5 if honesty == "over-confident" else 1.0)
    drafter = replace(drafter, honesty=honesty)
    kinds = (Kind(alpha=3.0, beta=1.0) if honesty == "over-confident" else Kind(),)
    return Population(honesty, (drafter,), kinds)


def trees() -> Population:
    """Branching trees of a trained drafter that costs something."""
    return Population("trees", (HEADS,), (Kind(alpha=3.0, beta=2.0),))


def small_model() -> Population:
    """Chains of a draft model, each level of which is a pass of its own."""
    return Population("small model", (SMALL_MODEL,), (Kind(alpha=4.0, beta=1.5),))


def copying() -> Population:
    """Long chains that are nearly always right."""
    return Population("copying", (replace(SUFFIX, max_depth=32),), (Kind(alpha=60.0, beta=1.0),))


def useless() -> Population:
    """Guesses that are never right, by a drafter that is sure of them."""
    drafter = replace(SUFFIX, honesty="uninformative")
    return Population("useless", (drafter,), (Kind(alpha=0.0),))


def mixed() -> Population:
    """A third of the requests copies, for the others no guess is right; the scores do not say."""
    drafter = replace(SUFFIX, max_depth=24, honesty="uninformative")
    kinds = (Kind(1.0, 40.0, 1.0), Kind(2.0, 0.0))
    return Population("mixed", (drafter,), kinds)


def several() -> Population:
    """A cheap drafter that guesses now and then, a dear one that always does; agreement tells."""
    cheap = replace(SUFFIX, coverage=0.4, honesty="uninformative", quality=0.9)
    return Population("several", (cheap, replace(HEADS, quality=0.8)), (Kind(alpha=2.0),))


def turning() -> Population:
    """Requests whose guesses become wrong half way."""
    drafter = replace(SUFFIX, max_depth=16, honesty="uninformative")
    return Population("turning", (drafter,), (Kind(alpha=30.0, beta=1.0, turn=0.5),))


def standard() -> Sequence[Population]:
    """One of each, for reports and tests."""
    return (
        chat("calibrated"),
        chat("over-confident"),
        chat("under-confident"),
        chat("uninformative"),
        trees(),
        small_model(),
        copying(),
        mixed(),
        several(),
        turning(),
        useless(),
    )
