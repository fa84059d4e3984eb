"""Respondent: who answers the questions, an engine in this process or a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from specdec.errors import UsageError
from specdec.evals.lossless.answer import Answer
from specdec.evals.lossless.question import Asked, Question

PLAIN = "plain"  # the setting that speculates nothing
NUM_LIKELIEST = 20  # tokens whose log-probabilities are asked for

Begun = Callable[[Question], None]
Done = Callable[[Question, Answer], None]


class Respondent(Protocol):
    """Answers with PLAIN or with one of the settings of the run, named as the report names it."""

    def fits(self, question: Question) -> bool:
        """Whether the prompt leaves room for an answer, as far as it is known here."""

    def ask(
        self, setting: str, asked: Sequence[Asked], concurrency: int, begun: Begun, done: Done
    ) -> None:
        """Answer all, `concurrency` at a time; says when one is begun and when it is done.

        Raises SpecdecError if one cannot be answered, ContextLengthExceeded if its prompt leaves no
        room for that.
        """

    def log_probs(
        self, question: Question, common: Sequence[int], tokens: Sequence[int]
    ) -> tuple[Mapping[int, float], int] | None:
        """Raw log-probabilities after the prompt and the common tokens, by plain decoding.

        Of the NUM_LIKELIEST tokens and of `tokens`; and the number of tokens before. None where
        they are not to be had.
        """

    def draws_known_noise(self) -> bool:
        """Whether sampled requests draw with the noise of `specdec.noise`."""

    def token_text(self, token_id: int) -> str:
        """What a token reads as; "" where it is not known."""

    def facts(self) -> dict[str, Any]:
        """What answers, for the report."""


def check_fits(respondent: Respondent, questions: Iterable[Question]) -> None:
    """Raises UsageError, naming the sample, for a prompt without room."""
    for question in questions:
        if not respondent.fits(question):
            raise does_not_fit(question)


def does_not_fit(question: Question) -> UsageError:
    """What to say of a sample whose first prompt leaves no room for an answer."""
    name = question.sample.sample_id
    return UsageError(f"sample {name} does not fit the context: leave it out")
