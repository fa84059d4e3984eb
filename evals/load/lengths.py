"""Lengths: how many tokens prompts and answers are to have, drawn evenly from a range."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from specdec.errors import UsageError


@dataclass(frozen=True)
class Lengths:
    """Tokens from `shortest` to `longest`, each length as likely as any other.

    Example: `Lengths.parse("100-400", "--prompt-tokens").draw(random.Random(0))`.
    """

    shortest: int
    longest: int

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """Of "200" or "100-400". Raises UsageError, naming the option, for anything else."""
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        shortest = int(found.group(1)) if found else 0
        longest = int(found.group(2) or shortest) if found else 0
        if not 1 <= shortest <= longest:
            raise UsageError(f"{option} takes a length or a range, as 200 or 100-400, not {text!r}")
        return cls(shortest, longest)

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.randint(self.shortest, self.longest)

    def __str__(self) -> str:
        if self.shortest == self.longest:
            return str(self.shortest)
        return f"{self.shortest}-{self.longest}"
