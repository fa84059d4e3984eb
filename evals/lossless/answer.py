"""Answer: what a question got, and where two answers to it differ first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """`token_ids` are None from a server that gives only text.

    Of the decode steps there are counts where they are known. `origins` says of each token who
    guessed it and at which depth, in process.
    """

    text: str
    token_ids: tuple[int, ...] | None
    finish_reason: str
    num_steps: int = 0
    num_accepted: int = 0
    origins: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Answer:
        """Example: `Answer.from_json(answer.as_json()) == answer`."""
        ids = fields["token_ids"]
        return cls(
            **{
                **fields,
                "token_ids": None if ids is None else tuple(ids),
                "origins": tuple(fields["origins"]),
            }
        )


@dataclass(frozen=True)
class Difference:
    """The first place where two answers differ, counted from 0 in tokens or in characters.

    `plain` and `other` are what stands there: a token id, a character, or None where the answer
    has ended.
    """

    position: int
    plain: int | str | None
    other: int | str | None


def first_difference(plain: Answer, other: Answer) -> Difference | None:
    """Where the answers differ; None if they are equal, the reason for their end included.

    Tokens are compared where both have them, else characters.

    Example: answers of the tokens 5, 6 and 5, 7 differ at position 1: 6 against 7.
    """
    ours: Sequence[int | str] = plain.text
    theirs: Sequence[int | str] = other.text
    if plain.token_ids is not None and other.token_ids is not None:
        ours, theirs = plain.token_ids, other.token_ids
    shorter = min(len(ours), len(theirs))
    position = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    if position == len(ours) == len(theirs) and plain.finish_reason == other.finish_reason:
        return None
    return Difference(
        position,
        ours[position] if position < len(ours) else None,
        theirs[position] if position < len(theirs) else None,
    )
