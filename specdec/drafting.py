"""Drafter: all that the engine knows of drafters, and how they are found by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import ClassVar, Self

from torch import Tensor

from specdec.config import AUTO, EngineConfig
from specdec.errors import UsageError
from specdec.loading import LoadedModel
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree
from specdec.verification import Verdict

ENTRY_POINT_GROUP = "specdec.drafters"


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may build on: the loaded target, the settings, and its own checkpoint.

    `checkpoint` is what follows the drafter's name, as in `--drafter medusa=FOLDER`, or None.
    """

    target: LoadedModel
    config: EngineConfig
    checkpoint: str | None = None


class Drafter(ABC):
    """Returns scored draft trees; whatever it guesses, the output stays the target's.

    Calls per request: `admit` once, then `draft` and `observe` per decode step, `release` once
    (also after an abort). Only `draft` must be written. It must respect each step's
    `node_budget` and start each tree with the step's root; a tree that is only its root is
    always right. A request may be preempted between two steps: its tokens stay.

    Example: docs/drafters.md holds a whole one.
    """

    name: ClassVar[str]
    """How `--drafter` and every count call it."""

    needs_hidden: bool = False
    """Whether `observe` wants the target's hidden states."""

    is_sequential: bool = False
    """Whether each level of a tree takes a pass of its own, so that fewer levels are cheaper."""

    uses_noise: bool = True
    """Whether a sampled request's guesses are ranked with its own noise.

    The engine turns it off unless verification is coupled: the other rules draw with that noise
    what replaces a rejected guess, so guesses that know it would bias the output.
    """

    worths: Sequence[float] | None = None
    """How often each of its best nodes is accepted, greatest first, as training measured it.

    None where that depends on the text. `--drafter auto` keeps a drafter with worths only where
    they pay for its pass.
    """

    num_bytes: int = 0
    """Most memory it holds outside of requests: weights, caches, buffers."""

    @classmethod
    def load(cls, context: DraftContext) -> Self:
        """Make one for an engine. Raises UsageError or CheckpointError with what to do."""
        if context.checkpoint is not None:
            raise UsageError(f"the drafter {cls.name} takes no checkpoint; leave out '=...'")
        return cls()

    @classmethod
    def suits(cls, target: LoadedModel) -> bool:
        """Whether `--drafter auto` considers it for this target."""
        return False

    def serves(self, request: Request) -> bool:
        """Whether it may have guesses for a request; if not, it is never asked or told of it."""
        return True

    def admit(self, request: Request) -> None:  # noqa: B027  # most have nothing to do
        """Learn of a new request; its prompt is known, its output is empty."""

    @abstractmethod
    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """One tree per decode step, in order, of at most its node budget.

        What is deeper than `max_depth` is not verified; a drafter that takes a pass for each level
        should stop there.

        A node's score is the drafter's estimate that the node is accepted given that its parent
        is, between 0 and 1: trees of several drafters are merged by it.
        """

    def observe(  # noqa: B027  # not every drafter needs it
        self, request: Request, verdict: Verdict, hidden: Tensor | None
    ) -> None:
        """Learn what was accepted; the request's tokens already hold it.

        hidden: fp32 [accepted length + 1, hidden_size], where asked for: the target's states
        after its last norm, of the root and of each accepted node. The last row is the state
        whose logits chose the bonus token.
        """

    def release(self, request: Request) -> None:  # noqa: B027  # not every drafter needs it
        """Forget a request."""

    def close(self) -> None:  # noqa: B027  # not every drafter needs it
        """The engine ends: write what should outlive it."""


def available_drafters() -> tuple[str, ...]:
    """Names registered under the `specdec.drafters` entry-point group, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


def check_drafters(names: str) -> None:
    """Raise UsageError unless `names` is what `--drafter` takes, `auto` included."""
    if names != AUTO:
        parse_drafters(names)


def suiting_drafters(target: LoadedModel) -> tuple[type[Drafter], ...]:
    """The drafters that `auto` considers for a target, by name."""
    found: list[type[Drafter]] = []
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        drafter: type[Drafter] = point.load()
        if drafter.suits(target):
            found.append(drafter)
    return tuple(found)


def parse_drafters(names: str) -> tuple[tuple[type[Drafter], str | None], ...]:
    """The drafter classes that a comma-separated list names, each with its checkpoint or None.

    Example: `parse_drafters("suffix,medusa=heads/")`. Raises UsageError naming the choices.
    """
    found: list[tuple[type[Drafter], str | None]] = []
    for item in names.split(","):
        name, _, checkpoint = item.strip().partition("=")
        points = list(entry_points(group=ENTRY_POINT_GROUP, name=name)) if name else []
        if not points:
            choices = ", ".join(available_drafters())
            raise UsageError(f"unknown drafter {name!r}; choose from {choices}")
        drafter: type[Drafter] = points[0].load()
        if any(known is drafter for known, _ in found):
            raise UsageError(f"drafter {name!r} is named twice")
        found.append((drafter, checkpoint or None))
    return tuple(found)
