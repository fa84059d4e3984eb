"""Divergence: the first token by which an answer and its repetition differ."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.request import FinishReason, TokenRecord
from specdec.server.messages import Output
from specdec.server.shadow_queue import Answered

NEAR_TIE = 0.1  # nats between the two likeliest tokens; rounding may order closer ones either way


@dataclass(frozen=True)
class Divergence:
    """`position` counts output tokens from 0. A token that is None is the end, for the reason.

    `margin` is by how much the target preferred its likeliest token to the next, in nats, where
    that is what chose the token; else None.
    """

    name: str
    position: int
    token_id: int | None
    finish_reason: FinishReason | None
    plain_token_id: int | None
    plain_finish_reason: FinishReason | None
    temperature: float
    margin: float | None = None

    @property
    def line(self) -> str:
        """For a log: ids and numbers, no text.

        Example: `warning: shadow: chatcmpl-1 choice 0 differs without speculation at output
        position 17: token 260 was answered, now 308; temperature 0, top-2 margin 0.0021 (near tie)`
        """
        before = _shown(self.token_id, self.finish_reason)
        now = _shown(self.plain_token_id, self.plain_finish_reason)
        line = (
            f"warning: shadow: {self.name} differs without speculation at output position "
            f"{self.position}: {before} was answered, now {now}; temperature {self.temperature:g}"
        )
        if self.margin is not None:
            tie = " (near tie)" if self.margin < NEAR_TIE else ""
            line += f", top-2 margin {self.margin:.4f}{tie}"
        return line


class Comparison:
    """Holds an answer against its repetition while that comes.

    Example: `Comparison(answered).take(output)` is None as long as they agree.
    """

    def __init__(self, answered: Answered) -> None:
        self._answered = answered
        self._num_equal = 0

    def take(self, output: Output) -> Divergence | None:
        """News of the repetition; the first divergence, if it shows one."""
        answered = self._answered
        for record in output.tokens:
            if self._num_equal == len(answered.output_ids):
                return self._divergence(record)
            if record.token_id != answered.output_ids[self._num_equal]:
                return self._divergence(record)
            self._num_equal += 1
        reason = output.finish_reason
        has_ended = reason in ("stop", "length")
        is_whole = self._num_equal == len(answered.output_ids)
        if has_ended and not (is_whole and reason == answered.finish_reason):
            return self._divergence(None, reason)
        return None

    def _divergence(
        self, record: TokenRecord | None, reason: FinishReason | None = None
    ) -> Divergence:
        answered, position = self._answered, self._num_equal
        is_past = position == len(answered.output_ids)
        margin = None
        if record is not None and len(record.top_logprobs) > 1:
            (_, first), (_, second), *_ = record.top_logprobs
            margin = first - second
        return Divergence(
            answered.name,
            position,
            None if is_past else answered.output_ids[position],
            answered.finish_reason if is_past else None,
            None if record is None else record.token_id,
            reason,
            answered.params.temperature,
            margin,
        )


def _shown(token_id: int | None, finish_reason: FinishReason | None) -> str:
    return f"the end ({finish_reason})" if token_id is None else f"token {token_id}"
