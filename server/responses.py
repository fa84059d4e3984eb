"""Shapes of the answers: completions, their chunks, usage and errors."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import UNSET, Struct, UnsetType

from specdec.errors import ContextLengthExceeded, EngineStopped, InvalidRequest, SpecdecError
from specdec.server.choice import Choice, Delta, LogprobEntry
from specdec.server.protocol import ModelNotFound

MAX_ERROR_LEN = 600  # characters; what a client sent must not come back at length

Json = dict[str, Any]


class CachedTokens(Struct):
    cached_tokens: int


class PredictionTokens(Struct):
    """What became of the nodes that were drafted from the client's prediction.

    A rejected one was drafted and not accepted, wherever in its tree it stood; a place of the text
    can be drafted in several steps. Rejected tokens are not among `completion_tokens`.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> PredictionTokens:
        """Add up finished choices."""
        num_drafted, num_accepted = (
            sum(choice.stats[name].get("prediction", 0) for choice in choices if choice.stats)
            for name in ("drafted_by_source", "accepted_by_source")
        )
        return cls(num_accepted, num_drafted - num_accepted)


class Usage(Struct, kw_only=True):
    """Token counts of a whole answer; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictionTokens | UnsetType = UNSET

    @classmethod
    def of(
        cls,
        num_prompt: int,
        choices: Sequence[Choice],
        num_choices: int,
        *,
        has_prediction: bool = False,
    ) -> Usage:
        """Add up choices, `num_choices` to a prompt; only a prompt's first could find it cached."""
        num_output = sum(choice.num_tokens for choice in choices)
        num_cached = sum(choice.num_prefix_hit for choice in choices[::num_choices])
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=CachedTokens(num_cached),
            completion_tokens_details=PredictionTokens.of(choices) if has_prediction else UNSET,
        )


class Metrics(Struct):
    """Acceptance figures at the response's root; null when there are several choices."""

    speculative_decoding: Mapping[str, Any] | None

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> Metrics:
        return cls(choices[0].stats if len(choices) == 1 else None)


class Chunk(Struct, kw_only=True):
    """One streamed event; `usage` is null on all but the last when the client asked for it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Json]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


class Answer(Struct, kw_only=True):
    """A whole answer, not streamed."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Json]
    usage: Usage
    metrics: Metrics


class Reply(ABC):
    """Makes the chunks and the whole answer of one HTTP request, all with the same identity."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    answer_object: ClassVar[str]

    def __init__(self, model: str, *, includes_usage: bool = False) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.includes_usage = includes_usage

    @abstractmethod
    def opening(self, choice: Choice) -> Chunk | None:
        """The chunk that opens a choice, if this kind of answer has one."""

    @abstractmethod
    def body(self, choice: Choice, delta: Delta) -> Chunk:
        """A chunk with newly printable text and its log-probabilities."""

    @abstractmethod
    def closing(self, choice: Choice) -> Chunk:
        """The chunk that says why a choice ended; it carries no text."""

    @abstractmethod
    def whole(self, choice: Choice, delta: Delta) -> Json:
        """A finished choice of an answer that is not streamed."""

    def totals(self, usage: Usage, metrics: Metrics) -> Chunk:
        """The last chunk of a stream that includes usage: it has no choices."""
        return self._chunk([], usage, metrics)

    def answer(self, choices: list[Json], usage: Usage, metrics: Metrics) -> Answer:
        """The whole answer."""
        return Answer(
            id=self.id,
            object=self.answer_object,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            metrics=metrics,
        )

    def _chunk(
        self,
        choices: list[Json],
        usage: Usage | None = None,
        metrics: Metrics | UnsetType = UNSET,
    ) -> Chunk:
        return Chunk(
            id=self.id,
            object=self.chunk_object,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage if self.includes_usage else UNSET,
            metrics=metrics,
        )


class ChatReply(Reply):
    """Answers of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"

    def opening(self, choice: Choice) -> Chunk:
        return self._delta(choice, {"role": "assistant", "content": ""})

    def body(self, choice: Choice, delta: Delta) -> Chunk:
        return self._delta(choice, {"content": delta.text}, logprobs=_chat_logprobs(choice, delta))

    def closing(self, choice: Choice) -> Chunk:
        return self._delta(
            choice, {}, finish_reason=choice.finish_reason, stop_reason=choice.stop_reason
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
        }

    def _delta(
        self,
        choice: Choice,
        delta: Json,
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
            ]
        )


class CompletionReply(Reply):
    """Answers of /v1/completions; a chunk has the shape of the answer."""

    id_prefix = "cmpl"
    chunk_object = answer_object = "text_completion"

    def opening(self, choice: Choice) -> None:
        return None

    def body(self, choice: Choice, delta: Delta) -> Chunk:
        return self._chunk([self._choice(choice, delta, finish_reason=None)])

    def closing(self, choice: Choice) -> Chunk:
        return self._chunk([self.whole(choice, Delta())])

    def whole(self, choice: Choice, delta: Delta) -> Json:
        finished = self._choice(choice, delta, finish_reason=choice.finish_reason)
        return {**finished, "stop_reason": choice.stop_reason}

    def _choice(self, choice: Choice, delta: Delta, *, finish_reason: str | None) -> Json:
        return {
            "index": choice.index,
            "text": delta.text,
            "logprobs": _completion_logprobs(choice, delta),
            "finish_reason": finish_reason,
        }


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
            top.setdefault(other.token, other.logprob)
        tops.append(top)
    return {
        "tokens": [entry.token for entry in delta.logprobs],
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
        message = str(error)[:MAX_ERROR_LEN]
        if isinstance(error, InvalidRequest):
            status, code = 400, None
            if isinstance(error, ContextLengthExceeded):
                code = "context_length_exceeded"
            elif isinstance(error, ModelNotFound):
                status, code = 404, "model_not_found"
            return cls(status, message, "invalid_request_error", error.param, code)
        if isinstance(error, EngineStopped):
            return cls(503, message, "server_error", code="overloaded")
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
