"""Goals: the times that an answer must keep to be a good one, for goodput."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.errors import UsageError
from specdec.evals.client.exchange import Exchange

NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Goals:
    """Most milliseconds by name: to the first token, per token after it, and for the whole answer.

    Example: `Goals.parse("ttft:1000,tpot:50").is_met(exchange)`.
    """

    most_ms: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> Goals:
        """Of `ttft:1000,tpot:50,e2el:5000`. Raises UsageError for anything else."""
        goals: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            try:
                goals[name] = float(value)
            except ValueError:
                goals[name] = math.nan
            if name not in NAMES or not 0 < goals[name] < math.inf:
                raise UsageError(
                    f"--goodput takes milliseconds by name, as ttft:1000,tpot:50,e2el:5000, "
                    f"not {part!r}"
                )
        return cls(tuple(goals.items()))

    def is_met(self, exchange: Exchange) -> bool:
        """Whether an answer came whole and kept every goal; one of a single token has no TPOT.

        Where the server gives no token counts, a goal for TPOT cannot be met.
        """
        if exchange.outcome != "ok":
            return False
        no_tpot = 0.0 if exchange.num_output == 1 else math.inf
        tpot_s = no_tpot if exchange.tpot_s is None else exchange.tpot_s
        ttft_s = math.inf if exchange.ttft_s is None else exchange.ttft_s
        seconds = {"ttft": ttft_s, "tpot": tpot_s, "e2el": exchange.end_s}
        return all(1e3 * seconds[name] <= most for name, most in self.most_ms)

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {most:g} ms" for name, most in self.most_ms)
