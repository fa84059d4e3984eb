"""Asker: who answers samples under settings, an engine of our own or a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.evals.acceptance.answer import Reply
from specdec.evals.acceptance.setting import Setting
from specdec.evals.data.sample import Sample


@dataclass(frozen=True)
class Question:
    """A sample's next turn: `answers` are those it got so far. `seed` is the same for all."""

    sample: Sample
    answers: tuple[str, ...]
    seed: int
    max_tokens: int

    @property
    def turn(self) -> int:
        return len(self.answers)

    @property
    def answer_id(self) -> str:
        """Unique among the answers of a run under one setting."""
        return self.sample.sample_id + (f", turn {self.turn + 1}" if self.turn else "")

    @property
    def head(self) -> dict[str, Any]:
        """What a recorded answer is called by, and what it was drawn with."""
        of = {"turn_of": self.sample.sample_id} if self.turn else {}
        return {"id": self.answer_id, **of, "task": self.sample.task, "seed": self.seed}


class Asker(Protocol):
    """Answers questions; `ask` raises ContextLengthExceeded for a prompt without room."""

    settings: Sequence[Setting]

    def ask(self, question: Question, setting: Setting, plain: Reply | None) -> Reply:
        """One answer. `plain` is the plain one, for drafters that have to know it."""

    def recorded(self, question: Question, reply: Reply) -> dict[str, Any]:
        """The prompt and the answer, as `read_samples` reads them but for its id and seed."""
