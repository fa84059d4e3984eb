"""Shapes of the answers: completions, their chunks, and errors."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import UNSET, Struct, UnsetType

from specdec.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineStopped,
    InvalidRequest,
    Overloaded,
    SpecdecError,
)
from specdec.server.choice import Choice, Delta, LogprobEntry
from specdec.server.protocol import GenerationBody, ModelNotFound
from specdec.server.sse import to_json
from specdec.server.usage import Metrics, Usage

# Bytes of JSON; what a client sent must not come back at length.
MAX_MESSAGE_LEN, MAX_PARAM_LEN = 600, 200

Json = dict[str, Any]


class Chunk(Struct, kw_only=True):
    """One streamed event; `usage` is null on all but the last when the client asked for it."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Json]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class Answer(Struct, kw_only=True):
    """A whole answer, not streamed."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Json]
    usage: Usage
    metrics: Metrics
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class Reply(ABC):
    """Makes the chunks and the whole answer of one HTTP request, all with the same identity.

    `id` names it inside the server and is the server's own; `shown_id` is made of the client's
    `request_id` where there is one.
    """

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    answer_object: ClassVar[str]

    def __init__(
        self, body: GenerationBody, *, fingerprint: str = "", force_usage: bool = False
    ) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.shown_id = self.id
        if body.request_id is not None:
            self.shown_id = f"{self.id_prefix}-{body.request_id}"
        self.created = int(time.time())
        self.model = body.model
        self.fingerprint = fingerprint
        self.includes_usage = body.includes_usage or force_usage
        self.includes_usage_so_far = body.includes_usage_so_far
        self.is_by_token = body.stream_interval == "token"

    @abstractmethod
    def opening(self, choice: Choice, usage: Usage | None) -> Chunk | None:
        """The chunk that opens a choice, if this kind of answer has one."""

    @abstractmethod
    def body(self, choice: Choice, delta: Delta, usage: Usage | None) -> Chunk:
        """A chunk with newly printable text and what else is told of its tokens."""

    @abstractmethod
    def closing(self, choice: Choice, usage: Usage | None) -> Chunk:
        """The chunk that says why a choice ended; it carries no text."""

    @abstractmethod
    def whole(self, choice: Choice, delta: Delta) -> Json:
        """A finished choice of an answer that is not streamed."""

    def totals(self, usage: Usage, metrics: Metrics) -> Chunk:
        """The last chunk of a stream that includes usage: it has no choices."""
        chunk = self._chunk([], usage)
        chunk.metrics = metrics
        return chunk

    def answer(
        self, finished: Sequence[tuple[Choice, Delta]], usage: Usage, metrics: Metrics
    ) -> Answer:
        """The whole answer: each choice with all of its deltas as one."""
        return Answer(
            id=self.shown_id,
            object=self.answer_object,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=[self.whole(choice, delta) for choice, delta in finished],
            usage=usage,
            metrics=metrics,
        )

    def _chunk(self, choices: list[Json], usage: Usage | None) -> Chunk:
        return Chunk(
            id=self.shown_id,
            object=self.chunk_object,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage or (None if self.includes_usage else UNSET),
        )


class ChatReply(Reply):
    """Answers of /v1/chat/completions; a chat's prompt is told at the root."""

    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"

    def opening(self, choice: Choice, usage: Usage | None) -> Chunk:
        chunk = self._delta(choice, {"role": "assistant", "content": ""}, usage)
        if choice.telling.token_ids and choice.index == 0:
            chunk.prompt_token_ids = choice.prompt_ids
        return chunk

    def body(self, choice: Choice, delta: Delta, usage: Usage | None) -> Chunk:
        return self._delta(
            choice,
            {"content": delta.text},
            usage,
            logprobs=_chat_logprobs(choice, delta),
            **_told(choice, delta),
        )

    def closing(self, choice: Choice, usage: Usage | None) -> Chunk:
        return self._delta(
            choice, {}, usage, finish_reason=choice.finish_reason, stop_reason=choice.stop_reason
        )

    def whole(self, choice: Choice, delta: Delta) -> Json:
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": delta.text,
                "refusal": None,
                "annotations": [],
            },
            "logprobs": _chat_logprobs(choice, delta),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **_told(choice, delta),
        }

    def answer(
        self, finished: Sequence[tuple[Choice, Delta]], usage: Usage, metrics: Metrics
    ) -> Answer:
        """See Reply."""
        answer = super().answer(finished, usage, metrics)
        first, _ = finished[0]
        if first.telling.token_ids:
            answer.prompt_token_ids = first.prompt_ids
        return answer

    def _delta(
        self,
        choice: Choice,
        delta: Json,
        usage: Usage | None,
        *,
        logprobs: Json | None = None,
        finish_reason: str | None = None,
        **extra: object,
    ) -> Chunk:
        return self._chunk(
            [
                {
                    "index": choice.index,
                    "delta": delta,
                    "logprobs": logprobs,
                    "finish_reason": finish_reason,
                    **extra,
                }
            ],
            usage,
        )


class CompletionReply(Reply):
    """Answers of /v1/completions; a chunk has the shape of the answer.

    There may be several prompts, so each choice tells its own.
    """

    id_prefix = "cmpl"
    chunk_object = answer_object = "text_completion"

    def opening(self, choice: Choice, usage: Usage | None) -> Chunk | None:
        if not choice.telling.token_ids:
            return None
        opening = {**self._choice(choice, Delta(), None), "prompt_token_ids": choice.prompt_ids}
        return self._chunk([opening], usage)

    def body(self, choice: Choice, delta: Delta, usage: Usage | None) -> Chunk:
        told = _told(choice, delta)
        return self._chunk([{**self._choice(choice, delta, None), **told}], usage)

    def closing(self, choice: Choice, usage: Usage | None) -> Chunk:
        return self._chunk([self._finished(choice, Delta())], usage)

    def whole(self, choice: Choice, delta: Delta) -> Json:
        told = _told(choice, delta)
        if choice.telling.token_ids:
            told["prompt_token_ids"] = choice.prompt_ids
        return {**self._finished(choice, delta), **told}

    def _finished(self, choice: Choice, delta: Delta) -> Json:
        finished = self._choice(choice, delta, choice.finish_reason)
        return {**finished, "stop_reason": choice.stop_reason}

    def _choice(self, choice: Choice, delta: Delta, finish_reason: str | None) -> Json:
        return {
            "index": choice.index,
            "text": delta.text,
            "logprobs": _completion_logprobs(choice, delta),
            "finish_reason": finish_reason,
        }


def _told(choice: Choice, delta: Delta) -> Json:
    """What this server tells besides OpenAI's fields, where the request wants it."""
    told: Json = {}
    if choice.telling.token_ids:
        told["token_ids"] = delta.token_ids
    if choice.telling.infos:
        told["token_info"] = delta.infos
    if choice.telling.rejected:
        told["rejected_drafts"] = delta.rejected
    return told


def _chat_logprobs(choice: Choice, delta: Delta) -> Json | None:
    if not choice.has_logprobs:
        return None
    content = [
        {**_chat_entry(entry), "top_logprobs": [_chat_entry(top) for top in entry.top]}
        for entry in delta.logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_entry(entry: LogprobEntry) -> Json:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.utf8}


def _completion_logprobs(choice: Choice, delta: Delta) -> Json | None:
    if not choice.has_logprobs or not (delta.logprobs or delta.text):
        return None
    tops: list[dict[str, float]] = []
    for entry in delta.logprobs:
        top: dict[str, float] = {}
        for other in (*entry.top, entry):  # likeliest first; it wins where two tokens read alike
            top.setdefault(other.spelled, other.logprob)
        tops.append(top)
    return {
        "tokens": [entry.spelled for entry in delta.logprobs],
        "token_logprobs": [entry.logprob for entry in delta.logprobs],
        "top_logprobs": tops,
        "text_offset": [entry.text_offset for entry in delta.logprobs],
    }


@dataclass(frozen=True)
class HttpError:
    """An error as HTTP answers it: the status and the `error` object."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: SpecdecError) -> HttpError:
        """The HTTP form of an error that is meant for the client.

        Example: `HttpError.of(InvalidRequest("n: too many", param="n")).status` is 400.
        """
        message = _shortened(" ".join(str(error).split()), MAX_MESSAGE_LEN)
        if isinstance(error, InvalidRequest):
            param = None if error.param is None else _shortened(error.param, MAX_PARAM_LEN)
            status, code = 400, None
            if isinstance(error, ContextLengthExceeded):
                code = "context_length_exceeded"
            elif isinstance(error, ModelNotFound):
                status, code = 404, "model_not_found"
            return cls(status, message, "invalid_request_error", param, code)
        if isinstance(error, EngineStopped | Overloaded):
            return cls(503, message, "server_error", code="overloaded")
        if isinstance(error, DeadlineExceeded):
            return cls(504, message, "server_error", code="timeout")
        return cls(500, message, "server_error")

    def as_json(self) -> Json:
        """The body: all four keys, always."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


BUG = HttpError(500, "the server failed; its log has the details", "server_error")


def _shortened(text: str, most: int) -> str:
    """As much of the text as takes at most so many bytes in JSON."""
    text = text[:most]
    while len(to_json(text)) > most:
        text = text[: len(text) * 9 // 10]
    return text
