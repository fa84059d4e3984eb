"""Request bodies of the OpenAI-compatible endpoints, field by field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

from specdec.errors import InvalidRequest
from specdec.limits import MAX_NODE_BUDGET, SpeculationLimits
from specdec.server.chat_message import ChatMessage, ContentPart, texts

MAX_CHOICES = 128  # of one HTTP request
MAX_SALT_LEN = 1024  # characters
REQUEST_ID = r"[A-Za-z0-9._:-]{1,128}"

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
ChoiceCount = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
NodeCount = Annotated[int, Meta(ge=0, le=MAX_NODE_BUDGET)]
Depth = Annotated[int, Meta(ge=1, le=MAX_NODE_BUDGET)]
DrafterName = Annotated[str, Meta(min_length=1, max_length=64)]
DrafterNames = Annotated[list[DrafterName], Meta(min_length=1, max_length=64)]
KeptCount = Annotated[int, Meta(ge=-1, le=2**63 - 1)]  # 0 is refused: it leaves no prompt
Salt = Annotated[str, Meta(max_length=MAX_SALT_LEN)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Variables of a chat template that have fields of their own, or none.
RESERVED_VARIABLES = (
    *("self", "messages", "tools", "documents"),
    *("add_generation_prompt", "continue_final_message"),
)


class Encoder(Protocol):
    """The part of a tokenizer that a request body needs."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class ModelNotFound(InvalidRequest):
    """The request names a model that this server does not serve (HTTP 404)."""


class StreamOptions(Struct, kw_only=True):
    """`include_obfuscation` changes nothing: this server pads no chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class TokenInfoOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """This server's own field: which tokens came from drafts, and which drafts were rejected."""

    rejected: bool | None = None


class Speculation(Struct, kw_only=True, forbid_unknown_fields=True):
    """This server's own field: what a request lets be drafted. It never changes the answer."""

    enabled: bool | None = None
    drafters: DrafterNames | None = None
    max_nodes: NodeCount | None = None
    max_depth: Depth | None = None

    def limits(self, running: Sequence[str]) -> SpeculationLimits:
        """The engine's form of it; raises InvalidRequest for a drafter that is not `running`.

        Example: `Speculation(drafters=["suffix"], max_nodes=4).limits(["prediction", "suffix"])`.
        """
        for name in self.drafters or ():
            if name not in running:
                raise InvalidRequest(
                    f"speculation.drafters: {name!r} does not run here; choose from "
                    + ", ".join(running),
                    param="speculation.drafters",
                )
        return SpeculationLimits(
            max_nodes=0 if self.enabled is False else self.max_nodes,
            max_depth=self.max_depth,
            drafters=None if self.drafters is None else tuple(dict.fromkeys(self.drafters)),
        )


class Prediction(Struct, kw_only=True):
    """The text that the client expects back: drafts follow it, and it never changes the answer.

    Unlike OpenAI's it goes together with every other field.
    """

    type: Literal["content"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        """The whole text; raises InvalidRequest for a part that is not text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(texts(self.content, "prediction.content"))


class GenerationBody(Struct, kw_only=True):
    """Fields shared by both endpoints; null means "not given" for every optional one."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    n: ChoiceCount | None = None
    best_of: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # no tokenizer served here has any
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: KeptCount | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Salt | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    speculation: Speculation | None = None
    prediction: Prediction | None = None
    token_info: bool | TokenInfoOptions | None = None
    stream_interval: Literal["step", "token"] | None = None
    # What describes the request and asks for nothing.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_usage_so_far(self) -> bool:
        """Whether every chunk says how many tokens there are up to it."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def token_limit(self) -> int | None:
        """Output tokens asked for at most, by either of the field's two names."""
        limit = self.max_completion_tokens
        return self.max_tokens if limit is None else limit

    @property
    def includes_token_info(self) -> bool:
        return bool(self.token_info)  # options are true

    @property
    def includes_rejected(self) -> bool:
        return isinstance(self.token_info, TokenInfoOptions) and bool(self.token_info.rejected)

    def check(self) -> None:
        """Raise InvalidRequest for fields that contradict each other or name nothing."""
        if self.best_of is not None and self.best_of != self.num_choices:
            raise InvalidRequest("best_of is supported only where it equals n", param="best_of")
        if self.request_id is not None and not re.fullmatch(REQUEST_ID, self.request_id):
            raise InvalidRequest(
                "request_id must be 1 to 128 letters, digits and -_.:", param="request_id"
            )


class ChatBody(GenerationBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None  # refused unless the server's settings allow it
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None
    parallel_tool_calls: bool | None = None  # there are no tools to call

    @property
    def num_logprobs(self) -> int | None:
        """Top log-probabilities asked for per token; None when none were."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """See GenerationBody."""
        super().check()
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
        if self.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens must be false: the chat template writes them",
                param="add_special_tokens",
            )
        for name in RESERVED_VARIABLES:
            if name in (self.chat_template_kwargs or ()):
                raise InvalidRequest(
                    f"chat_template_kwargs must not set {name}", param="chat_template_kwargs"
                )

    def template_messages(self) -> list[dict[str, Any]]:
        """The conversation in the form of the chat template."""
        if not self.messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        return [
            message.as_template(f"messages[{idx}]") for idx, message in enumerate(self.messages)
        ]

    def template_variables(self) -> dict[str, Any]:
        """What else the chat template reads."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        if self.documents:
            variables["documents"] = self.documents
        return variables


class CompletionBody(GenerationBody, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[Int64]]
    logprobs: Int64 | None = None
    echo: bool | None = None

    @property
    def is_echo_alone(self) -> bool:
        """Whether nothing but the prompt is asked for."""
        return bool(self.echo) and self.token_limit == 0

    def check(self) -> None:
        """See GenerationBody."""
        super().check()
        if self.echo and self.logprobs is not None:
            raise InvalidRequest(
                "echo together with logprobs is not supported: "
                "this server computes no log-probabilities of prompts",
                param="echo",
            )

    def prompts(self, encoder: Encoder) -> list[list[int]]:
        """Token ids of each prompt: one for a string or ids, several for a list of either.

        Example: `"a"` and `[5, 6]` are one prompt each, `["a", "b"]` and `[[5], [6]]` are two.
        """
        return [
            encoder.encode(item, add_special_tokens=self.add_special_tokens is not False)
            if isinstance(item, str)
            else item
            for item in self.given_prompts
        ]

    @property
    def given_prompts(self) -> list[str | list[int]]:
        """Each prompt as it was given, a text or token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and all(isinstance(item, int) for item in given):
            return [[item for item in given if isinstance(item, int)]]
        if not given or any(isinstance(item, int) for item in given) or len(given) > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt must be a string, token ids, or a list of 1 to {MAX_CHOICES} of either",
                param="prompt",
            )
        return [item for item in given if not isinstance(item, int)]
