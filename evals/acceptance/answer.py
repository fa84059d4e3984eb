"""Answer: one answer of one setting, what it cost and what became of its guesses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from specdec.evals.acceptance.step_counts import StepCounts


@dataclass(frozen=True)
class Measured:
    """Times in seconds, None for what a server does not tell.

    `prefill_s` runs from the submission to the first tokens, of which there are `num_first`;
    `decode_s` from there to the end; `draft_s` is all that drafters took, of both.
    """

    num_prompt: int
    num_output: int
    num_first: int | None
    prefill_s: float
    decode_s: float
    draft_s: float | None
    finish_reason: str
    counts: StepCounts | None

    @property
    def num_timed(self) -> int | None:
        """The tokens that came in `decode_s`."""
        return None if self.num_first is None else self.num_output - self.num_first

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(frozen=True)
class Reply:
    """What was said, and its figures. `token_ids` are None where a server gave none."""

    text: str
    token_ids: tuple[int, ...] | None
    measured: Measured

    def equals(self, other: Reply) -> bool:
        """Token by token, or by text where tokens are not to be had."""
        if self.token_ids is None or other.token_ids is None:
            return self.text == other.text
        return self.token_ids == other.token_ids


@dataclass(frozen=True)
class Answer:
    """The record of one answer; `turn` counts from 0, `setting` is a setting's name.

    `is_equal` says whether it is the plain answer, and is None without one.
    """

    sample_id: str
    task: str
    turn: int
    setting: str
    is_equal: bool | None
    measured: Measured

    def as_json(self) -> dict[str, Any]:
        """All fields in one object, ready for JSON."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        measured = vars(own.pop("measured"))
        counts = self.measured.counts
        return {**own, **measured, "counts": None if counts is None else counts.as_json()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Answer:
        """Example: `Answer.from_json(answer.as_json()) == answer`."""
        counts = found["counts"]
        rest = {**found, "counts": None if counts is None else StepCounts.from_json(counts)}
        own = {item.name: rest.pop(item.name) for item in fields(cls) if item.name != "measured"}
        return cls(**own, measured=Measured(**rest))
