"""Setting: one way of answering that is held against others, and the sweep that settings make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from specdec.drafting import check_drafters as check_names
from specdec.errors import UsageError
from specdec.limits import MAX_NODE_BUDGET, SpeculationLimits

PLAIN = "none"
SERVER = "server"  # what a server does when it is asked for nothing
_NEEDING = ("prediction", "synthetic")  # the drafters that have to know the answer

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Setting:
    """A drafter, as `--drafter` takes it, and its limits; None leaves a limit out.

    `name` is unique in a sweep, and says what differs in it.

    Example: `Setting("suffix, 8 nodes", "suffix", node_budget=8)`.
    """

    name: str
    drafter: str
    temperature: float = 0.0
    node_budget: int | None = None
    max_depth: int | None = None

    @property
    def is_plain(self) -> bool:
        return self.drafter == PLAIN

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names alone: `suffix,medusa=heads` is suffix and medusa."""
        return tuple(item.strip().partition("=")[0] for item in self.drafter.split(","))

    @property
    def needs_answer(self) -> bool:
        """Whether the plain answer has to be there first."""
        return any(name in _NEEDING for name in self.drafters)

    @property
    def limits(self) -> SpeculationLimits:
        return SpeculationLimits(max_nodes=self.node_budget, max_depth=self.max_depth)


@dataclass(frozen=True)
class Sweep:
    """Every drafter with every node budget, depth and temperature, and plain decoding once at each.

    Raises UsageError for a value that means nothing.

    Example: `Sweep(("suffix", "medusa"), node_budgets=(4, 16)).settings()` are five.
    """

    drafters: tuple[str, ...]
    node_budgets: tuple[int | None, ...] = (None,)
    depths: tuple[int | None, ...] = (None,)
    temperatures: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        for name, values in (("--node-budget", self.node_budgets), ("--depth", self.depths)):
            for value in values:
                if value is not None and not 1 <= value <= MAX_NODE_BUDGET:
                    raise UsageError(
                        f"{name} must be between 1 and {MAX_NODE_BUDGET}, not {value}; "
                        "plain decoding is always measured"
                    )
        for temperature in self.temperatures:
            if not 0 <= temperature <= 100:
                raise UsageError(f"--temperature must be between 0 and 100, not {temperature:g}")

    def settings(self) -> list[Setting]:
        """Plain decoding first at each temperature."""
        found: list[Setting] = []
        for temperature in self.temperatures:
            found.append(Setting(self._name(PLAIN, temperature), PLAIN, temperature))
            for drafter, budget, depth in product(self.drafters, self.node_budgets, self.depths):
                if drafter != PLAIN:
                    name = self._name(drafter, temperature, budget, depth)
                    found.append(Setting(name, drafter, temperature, budget, depth))
        return list(dict.fromkeys(found))

    def _name(
        self,
        drafter: str,
        temperature: float,
        node_budget: int | None = None,
        max_depth: int | None = None,
    ) -> str:
        parts = [drafter]
        if len(self.node_budgets) > 1 and node_budget is not None:
            parts.append(f"{node_budget} nodes")
        if len(self.depths) > 1 and max_depth is not None:
            parts.append(f"depth {max_depth}")
        if len(self.temperatures) > 1:
            parts.append(f"T {temperature:g}")
        return ", ".join(parts)


def check_drafters(drafters: Sequence[str]) -> None:
    """Raise UsageError for a drafter that there is not, before anything is loaded."""
    for drafter in drafters:
        check_names(drafter)


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """The numbers of an option, commas between them.

    Example: `numbers("--depth", "2,4,8", int)`. Raises UsageError naming the option.
    """
    try:
        return tuple(dict.fromkeys(kind(item) for item in text.split(",")))
    except ValueError:
        raise UsageError(f"{option} takes numbers with commas between them, not {text!r}") from None


def in_turn(settings: Sequence[Setting], number: int) -> list[Setting]:
    """The settings in the order in which they answer the number-th sample.

    Each sample begins with another one, so that a machine that drifts does so for all of them.
    Those that have to know the plain answer come last.
    """
    start = number % len(settings)
    order = [*settings[start:], *settings[:start]]
    return sorted(order, key=lambda setting: setting.needs_answer)
