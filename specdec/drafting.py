"""The Drafter protocol: all that the engine knows of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Protocol

from specdec.errors import UsageError
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree
from specdec.verification import Verdict

ENTRY_POINT_GROUP = "specdec.drafters"


class Drafter(Protocol):
    """Returns scored draft trees; whatever it guesses, the output stays the target's.

    Calls per request: `admit` once, then `draft` and `observe` per decode step, `release` once
    (also after an abort). `draft` must respect each step's `node_budget` and start each tree with
    the step's root; a tree that is only its root is always right.
    """

    name: str

    def admit(self, request: Request) -> None:
        """Learn of a new request; its prompt is known, its output is empty."""

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """One tree per decode step, in order."""

    def observe(self, request: Request, verdict: Verdict) -> None:
        """Learn what was accepted; the request's tokens already hold it."""

    def release(self, request: Request) -> None:
        """Forget a request."""


def available_drafters() -> tuple[str, ...]:
    """Names registered under the `specdec.drafters` entry-point group, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


def load_drafter(name: str) -> Drafter:
    """Make the drafter registered as `name`.

    Example: `load_drafter("ngram")`. Raises UsageError naming the choices.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        drafter: Drafter = point.load()()
        return drafter
    raise UsageError(f"unknown drafter {name!r}; choose from {', '.join(available_drafters())}")
