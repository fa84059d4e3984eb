"""Choice: one answer of a request in the making, from token records to text."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.params import SamplingParams
from specdec.request import FinishReason, TokenRecord
from specdec.server.messages import Output, revive_error
from specdec.server.provenance import RejectedDraft, TokenInfo, token_text
from specdec.text import TextStream
from specdec.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; clients read this as "very unlikely"
MAX_ECHO_LEN = 8192  # characters of a prompt in one delta; some take six bytes


@dataclass(frozen=True)
class LogprobEntry:
    """A token, how likely the target thought it, and the likeliest tokens in its place.

    `utf8` may be a part of a character, for which `token` is U+FFFD. `text_offset` is the number
    of characters that the tokens before it complete.
    """

    token: str
    logprob: float
    utf8: list[int]
    top: tuple[LogprobEntry, ...] = ()
    text_offset: int = 0

    @property
    def spelled(self) -> str:
        """The token, by its bytes where it is a part of a character: many of those read alike."""
        if "\ufffd" not in self.token:
            return self.token
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.utf8)


@dataclass(frozen=True)
class Delta:
    """Text newly printable for a choice, and what the request wants told of its tokens."""

    text: str = ""
    num_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobEntry, ...] = ()
    infos: tuple[TokenInfo, ...] = ()
    rejected: tuple[RejectedDraft, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether it tells nothing."""
        return not (self.text or self.token_ids or self.logprobs or self.infos or self.rejected)

    @classmethod
    def join(cls, deltas: Iterable[Delta]) -> Delta:
        """Several deltas as one; a streamed answer and a whole one agree by this."""
        parts = list(deltas)
        if len(parts) == 1:
            return parts[0]
        return cls(
            "".join([part.text for part in parts]),
            sum([part.num_tokens for part in parts]),
            tuple([item for part in parts for item in part.token_ids]),
            tuple([item for part in parts for item in part.logprobs]),
            tuple([item for part in parts for item in part.infos]),
            tuple([item for part in parts for item in part.rejected]),
        )


@dataclass(frozen=True)
class Telling:
    """What a request wants told besides the text. `echo` is shown before the output."""

    token_ids: bool = False
    tokens_as_ids: bool = False  # in log-probabilities: "token_id:5" for the token's text
    infos: bool = False
    rejected: bool = False
    stop: bool = False  # the stop string or token too
    echo: str = ""


TEXT_ALONE = Telling()


class Choice:
    """Turns the outputs of one engine request into deltas and keeps what the answer reports.

    Token ids, log-probabilities, provenance and usage all cover the same tokens: every token up to
    the one that ended the request, that one included. It has no text if it is an end of sequence
    or a stop token; a stop string and what follows it is cut from the text.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        telling: Telling = TEXT_ALONE,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.telling = telling
        self.prompt_ids = prompt_ids
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
        self._text = TextStream(
            tokenizer,
            params.stop,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            keeps_stop=telling.stop,
        )
        self._unsaid = telling.echo
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def has_logprobs(self) -> bool:
        return self._params.logprobs is not None

    def take(self, output: Output) -> list[Delta]:
        """A delta for each token that an output brings, whether or not it failed then.

        What is printable only at the end comes with the last token.
        """
        self.num_tokens += len(output.tokens)
        self.num_prefix_hit = max(self.num_prefix_hit, output.num_prefix_hit)
        texts = self._printable(output)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stats = output.stats
        if not (output.tokens or self.finish_reason):
            return []  # it was accepted, no more
        return [*self._echoed(), *self._deltas(output, texts)]

    @staticmethod
    def check(output: Output) -> None:
        """Raise the SpecdecError that ended a request, if one did."""
        if output.finish_reason in ("abort", "error"):
            message = output.error or f"the request ended with {output.finish_reason}"
            raise revive_error(output.error_kind, message, output.error_param)

    def echo(self) -> list[Delta]:
        """End a choice that shows its prompt and has no output."""
        self.finish_reason = "length"
        return list(self._echoed())

    def _echoed(self) -> Iterator[Delta]:
        text, self._unsaid = self._unsaid, ""
        for start in range(0, len(text), MAX_ECHO_LEN):
            yield Delta(text[start : start + MAX_ECHO_LEN])

    def _printable(self, output: Output) -> list[str]:
        """The text that became printable with each token."""
        texts = [""] * len(output.tokens)
        num_shown = len(texts)
        last = output.tokens[-1].token_id if output.tokens else None
        if output.finish_reason == "stop" and last in self._stop_ids:
            self.stop_reason = last if last in self._params.stop_token_ids else None
            num_shown -= not self.telling.stop
        for idx in range(num_shown):
            texts[idx] = self._text.push(output.tokens[idx].token_id)
        if output.finish_reason not in ("stop", "length"):
            return texts
        rest = self._text.finish()
        texts = [*texts[:-1], texts[-1] + rest] if texts else [rest] if rest else []
        if self._text.stopped_by is not None:
            self.stop_reason = self._text.stopped_by
        return texts

    def _deltas(self, output: Output, texts: Sequence[str]) -> Iterator[Delta]:
        tell, tokenizer, records = self.telling, self._tokenizer, output.tokens
        if not records:
            yield from (Delta(text) for text in texts)
        for idx, (record, text) in enumerate(zip(records, texts, strict=False)):
            ends_step = idx + 1 == len(records) or records[idx + 1].step != record.step
            yield Delta(
                text,
                1,
                (record.token_id,) if tell.token_ids else (),
                (self._logprobs(record),) if self.has_logprobs else (),
                (TokenInfo.of(record, tokenizer),) if tell.infos else (),
                tuple(
                    RejectedDraft.of(node, tokenizer)
                    for node in output.rejected
                    if node.step == record.step
                )
                if tell.rejected and ends_step
                else (),
            )

    def _logprobs(self, record: TokenRecord) -> LogprobEntry:
        chosen = self._entry(record.token_id, record.logprob)
        top = tuple(self._entry(token_id, value) for token_id, value in record.top_logprobs)
        entry = LogprobEntry(chosen.token, chosen.logprob, chosen.utf8, top, self._offset)
        self._offset += len(self._characters.decode(bytes(chosen.utf8)))
        return entry

    def _entry(self, token_id: int, logprob: float | None) -> LogprobEntry:
        token = token_text(token_id, self._tokenizer)
        utf8 = list(self._tokenizer.token_bytes(token_id))
        is_known = logprob is not None and math.isfinite(logprob)
        value = max(logprob, LEAST_LOGPROB) if logprob is not None and is_known else LEAST_LOGPROB
        if self.telling.tokens_as_ids:
            token = f"token_id:{token_id}"
        return LogprobEntry(token, value, utf8)
