"""Comparison: two answers to one question, and of what kind their divergence is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specdec.evals.lossless.answer import Answer, first_difference
from specdec.evals.lossless.margin import Margin
from specdec.evals.lossless.question import Question
from specdec.evals.lossless.respondent import Respondent

Kind = Literal["near tie", "fault"]


@dataclass(frozen=True)
class Divergence:
    """The first place where an answer is not the plain one.

    `position` counts output tokens from 0, or characters where tokens are not known. `plain` and
    `other` are token ids, None where an answer has ended or where only text is known. `margin` is
    None where no two tokens can be weighed; then it is a fault.
    """

    position: int
    plain: int | None
    other: int | None
    plain_text: str
    other_text: str
    origin: str  # of the other token: who guessed it, and the depth in its tree
    margin: Margin | None
    kind: Kind

    @classmethod
    def between(
        cls,
        question: Question,
        plain: Answer,
        other: Answer,
        respondent: Respondent,
        tie_margin: float,
    ) -> Divergence | None:
        """The divergence of two answers, weighed by the target itself; None of equal ones."""
        found = first_difference(plain, other)
        if found is None:
            return None
        margin = None
        if isinstance(found.plain, int) and isinstance(found.other, int):
            common = (plain.token_ids or ())[: found.position]
            margin = _margin(question, common, (found.plain, found.other), respondent)
        is_tie = margin is not None and margin.is_near_tie(tie_margin, question.temperature)
        origin = other.origins[found.position] if found.position < len(other.origins) else ""
        return cls(
            found.position,
            found.plain if isinstance(found.plain, int) else None,
            found.other if isinstance(found.other, int) else None,
            _text(found.plain, respondent),
            _text(found.other, respondent),
            origin,
            margin,
            "near tie" if is_tie else "fault",
        )

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "position": self.position,
            "plain_token": self.plain,
            "token": self.other,
            "plain_text": self.plain_text,
            "text": self.other_text,
            "origin": self.origin,
            "top2_margin": None if self.margin is None else self.margin.top2,
            "gap": None if self.margin is None else self.margin.gap,
            "kind": self.kind,
        }


@dataclass(frozen=True)
class Comparison:
    """A setting's answer to a question beside the plain one."""

    setting: str
    question: Question
    plain: Answer
    answer: Answer
    divergence: Divergence | None

    @property
    def num_compared(self) -> int:
        """Tokens, or characters, up to the first that differs, which counts too."""
        whole = self.plain.text if self.plain.token_ids is None else self.plain.token_ids
        if self.divergence is None:
            return len(whole)
        return self.divergence.position + (self.divergence.position < len(whole))


def _text(token: int | str | None, respondent: Respondent) -> str:
    return respondent.token_text(token) if isinstance(token, int) else token or ""


def _margin(
    question: Question, common: tuple[int, ...], tokens: tuple[int, int], respondent: Respondent
) -> Margin | None:
    if question.temperature and not respondent.draws_known_noise():
        return None
    found = respondent.log_probs(question, common, tokens)
    if found is None:
        return None
    log_probs, position = found
    return Margin.of(
        log_probs,
        tokens,
        temperature=question.temperature,
        seed=question.seed,
        position=position,
    )
