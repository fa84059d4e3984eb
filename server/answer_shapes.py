"""Answer shapes: every answer of the server, field by field, as /openapi.json promises them.

Most answers are put together elsewhere from parts; these structs only describe them, and the tests
hold each answer against its shape. A field that may be absent is UNSET.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from specdec.server.provenance import RejectedDraft, TokenInfo
from specdec.server.usage import Usage


class Shape(Struct, kw_only=True, forbid_unknown_fields=True):
    """An answer, or a part of one, that has no other fields than these."""


class Error(Shape, kw_only=True):
    """What is wrong: one line that says what to do, and the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Shape, kw_only=True):
    """Every answer that is not a success."""

    error: Error


class SpeculativeDecoding(Shape, kw_only=True):
    """How the drafts of an answer fared, all of its choices together."""

    mean_acceptance_length: float  # tokens per step, the bonus token included
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # entry n: steps that accepted n draft tokens
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    deepest: int = field(name="num_spec_tokens")  # depth of the deepest draft node
    accepted_by_source: dict[str, int]
    drafted_by_source: dict[str, int]
    disabled_drafters: dict[str, Any] | list[Any] | UnsetType = UNSET


class AnswerMetrics(Shape, kw_only=True):
    """Figures beside the tokens."""

    speculative_decoding: SpeculativeDecoding


class Told(Shape, kw_only=True):
    """What a choice tells besides OpenAI's fields, where the request asks for it."""

    token_ids: list[int] | UnsetType = UNSET
    token_info: list[TokenInfo] | UnsetType = UNSET
    rejected_drafts: list[RejectedDraft] | UnsetType = UNSET


class TopLogprob(Shape, kw_only=True):
    """A token and the logarithm of its probability; of half a character the bytes tell."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, and the likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape, kw_only=True):
    """Log-probabilities of a chat's tokens."""

    content: list[TokenLogprob]
    refusal: None


class Message(Shape, kw_only=True):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None
    annotations: list[Any]


class ChatChoice(Told, kw_only=True):
    """One whole answer of a chat."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class ChatAnswer(Shape, kw_only=True):
    """A chat's answer that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: AnswerMetrics
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Shape, kw_only=True):
    """What is new of a message: its role in the first chunk, then text."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Told, kw_only=True):
    """What a chunk brings for one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(Shape, kw_only=True):
    """One event of a chat that is streamed; the last one with usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(Shape, kw_only=True):
    """Log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Told, kw_only=True):
    """One completion, whole or what a chunk brings of it: then its `finish_reason` is null."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionAnswer(Shape, kw_only=True):
    """A completion that is not streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: AnswerMetrics


class CompletionChunk(Shape, kw_only=True):
    """One event of a completion that is streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET


class Model(Shape, kw_only=True):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(Shape, kw_only=True):
    """A list of one model."""

    object: Literal["list"]
    data: list[Model]


class Health(Shape, kw_only=True):
    """Requests are served."""

    status: Literal["ok"]


class Version(Shape, kw_only=True):
    """The server's version."""

    version: str


class Speculation(Struct, kw_only=True):
    """What the controller decides and why; which fields there are depends on the controller."""

    model: str
    drafter: str
    decisions: list[dict[str, Any]]


class Percentiles(Shape, kw_only=True):
    """Milliseconds; null while nothing was seen."""

    p50: float | None
    p99: float | None


class DrafterLoad(Shape, kw_only=True):
    """Tokens that a drafter has drafted, and those of them that were accepted."""

    name: str
    drafted: int
    accepted: int


class ShadowLoad(Shape, kw_only=True):
    """Answers repeated without speculation, where `--shadow` asks for it; dropped ones by why."""

    checked: int
    divergences: int
    dropped: dict[str, int]
    waiting: int


class Load(Shape, kw_only=True):
    """How the server does: rates of the last ten seconds, and counts since its start."""

    uptime_s: float
    engine_up: bool
    model: str
    drafters: list[str]
    queued: int
    running: int
    tokens_per_s: float
    tokens_per_step: float | None
    acceptance_rate: float | None
    prefix_hit_rate: float | None
    kv_used: float | None
    num_steps: int
    step_ms: float | None
    ttft_ms: Percentiles
    itl_ms: Percentiles
    reasons: dict[str, int]
    drafters_detail: list[DrafterLoad]
    shadow: ShadowLoad | UnsetType = UNSET
