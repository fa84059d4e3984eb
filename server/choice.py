"""Choice: one answer of a request in the making, from token records to text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.params import SamplingParams
from specdec.request import FinishReason, TokenRecord
from specdec.server.messages import Output, revive_error
from specdec.text import TextStream
from specdec.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; clients read this as "very unlikely"


@dataclass(frozen=True)
class LogprobEntry:
    """A token, how likely the target thought it, and the likeliest tokens in its place.

    `utf8` is None for a token that is not whole characters; `text_offset` counts the characters
    of the tokens before it.
    """

    token: str
    logprob: float
    utf8: list[int] | None
    top: tuple[LogprobEntry, ...] = ()
    text_offset: int = 0


@dataclass(frozen=True)
class Delta:
    """Text newly printable for a choice, and the entries of the tokens that came with it."""

    text: str = ""
    logprobs: tuple[LogprobEntry, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.logprobs

    @classmethod
    def join(cls, deltas: Iterable[Delta]) -> Delta:
        """All of a choice's deltas as one; a streamed answer and a whole one agree by this."""
        parts = list(deltas)
        entries = tuple(entry for part in parts for entry in part.logprobs)
        return cls("".join(part.text for part in parts), entries)


class Choice:
    """Turns the outputs of one engine request into deltas and keeps what the answer reports.

    Every output token counts and has its log-probability entry; a token that ended the request
    (end of sequence, stop token) has no text, and a stop string and what follows it is cut.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.num_tokens = 0
        self.num_prefix_hit = 0
        self.stats: Mapping[str, Any] | None = None
        self._tokenizer = tokenizer
        self._params = params
        self._stop_ids = params.stop_token_ids | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self._text = TextStream(tokenizer, params.stop, min_tokens=params.min_tokens)
        self._offset = 0

    @property
    def has_logprobs(self) -> bool:
        return self._params.logprobs is not None

    def take(self, output: Output) -> Delta:
        """The delta that an output brings; raises SpecdecError if the engine gave up."""
        self.num_tokens += len(output.tokens)
        self.num_prefix_hit = max(self.num_prefix_hit, output.num_prefix_hit)
        if output.finish_reason in ("abort", "error"):
            message = output.error or f"the request ended with {output.finish_reason}"
            raise revive_error(output.error_kind, message, output.error_param)
        text = self._printable(output)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stats = output.stats
        entries = self._entries(output.tokens) if self.has_logprobs else ()
        return Delta(text, tuple(entries))

    def _printable(self, output: Output) -> str:
        token_ids = [record.token_id for record in output.tokens]
        if output.finish_reason == "stop" and token_ids and token_ids[-1] in self._stop_ids:
            last = token_ids.pop()
            self.stop_reason = last if last in self._params.stop_token_ids else None
        text = "".join([self._text.push(token_id) for token_id in token_ids])
        if output.finish_reason is None:
            return text
        text += self._text.finish()
        if self._text.stopped_by is not None:
            self.stop_reason = self._text.stopped_by
        return text

    def _entries(self, records: Sequence[TokenRecord]) -> Iterable[LogprobEntry]:
        for record in records:
            chosen = self._entry(record.token_id, record.logprob)
            top = tuple(self._entry(token_id, value) for token_id, value in record.top_logprobs)
            yield LogprobEntry(chosen.token, chosen.logprob, chosen.utf8, top, self._offset)
            self._offset += len(chosen.token)

    def _entry(self, token_id: int, logprob: float | None) -> LogprobEntry:
        token = self._tokenizer.decode([token_id], skip_special_tokens=False)
        utf8 = None if "\ufffd" in token else list(token.encode())
        is_known = logprob is not None and math.isfinite(logprob)
        value = max(logprob, LEAST_LOGPROB) if logprob is not None and is_known else LEAST_LOGPROB
        return LogprobEntry(token, value, utf8)
