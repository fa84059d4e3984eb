"""Request bodies of the OpenAI-compatible endpoints and their way to SamplingParams."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from specdec.errors import ContextLengthExceeded, InvalidRequest
from specdec.limits import MAX_NODE_BUDGET, SpeculationLimits
from specdec.params import SEED_RANGE, SamplingParams
from specdec.server.unsupported import check_supported

MAX_STOPS = 4
MAX_CHOICES = 128  # of one HTTP request
COMPLETION_MAX_TOKENS = 16  # what the completions endpoint gives a client that asks for nothing

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
ChoiceCount = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
NodeCount = Annotated[int, Meta(ge=0, le=MAX_NODE_BUDGET)]
Depth = Annotated[int, Meta(ge=1, le=MAX_NODE_BUDGET)]
DrafterName = Annotated[str, Meta(min_length=1, max_length=64)]
DrafterNames = Annotated[list[DrafterName], Meta(min_length=1, max_length=64)]


class Encoder(Protocol):
    """The part of a tokenizer that a request body needs."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class ModelNotFound(InvalidRequest):
    """The request names a model that this server does not serve (HTTP 404)."""


class StreamOptions(Struct, kw_only=True):
    """Of these only `include_usage` changes the stream; clients send the others out of habit."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


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


class ContentPart(Struct, kw_only=True):
    """One part of a content; only `text` parts are understood."""

    type: str
    text: str | None = None


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
        return "".join(_texts(self.content, "prediction.content"))


class GenerationBody(Struct, kw_only=True):
    """Fields shared by both endpoints; null means "not given" for every optional one."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    n: ChoiceCount | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    speculation: Speculation | None = None
    prediction: Prediction | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        return self.n or 1


class ChatMessage(Struct, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None

    def as_template(self, where: str) -> dict[str, Any]:
        """What the chat template reads; raises InvalidRequest for what it cannot show."""
        if self.tool_calls:
            raise InvalidRequest("tool_calls are not supported", param=f"{where}.tool_calls")
        content = self.content
        if isinstance(content, list):
            content = "\n".join(_texts(content, f"{where}.content"))
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": content or ""}
        return message if self.name is None else {**message, "name": self.name}


class ChatBody(GenerationBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Top log-probabilities asked for per token; None when none were."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_messages(self) -> list[dict[str, Any]]:
        """The conversation in the form of the chat template."""
        if not self.messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        return [
            message.as_template(f"messages[{idx}]") for idx, message in enumerate(self.messages)
        ]


class CompletionBody(GenerationBody, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[Int64]]
    logprobs: Int64 | None = None

    def prompts(self, encoder: Encoder) -> list[list[int]]:
        """Token ids of each prompt: one for a string or ids, several for a list of either.

        Example: `"a"` and `[5, 6]` are one prompt each, `["a", "b"]` and `[[5], [6]]` are two.
        """
        given = self.prompt
        if isinstance(given, str):
            return [encoder.encode(given)]
        if given and all(isinstance(item, int) for item in given):
            return [[item for item in given if isinstance(item, int)]]
        if not given or any(isinstance(item, int) for item in given) or len(given) > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt must be a string, token ids, or a list of 1 to {MAX_CHOICES} of either",
                param="prompt",
            )
        return [
            encoder.encode(item) if isinstance(item, str) else item
            for item in given
            if not isinstance(item, int)
        ]


Body = TypeVar("Body", bound=GenerationBody)


def parse_body(raw: bytes, kind: type[Body]) -> Body:
    """Decode and check a request body.

    Raises InvalidRequest: malformed JSON, a wrong type, or a field that is known but unsupported.
    Unknown fields are ignored. Example: `parse_body(b'{"model":"m","prompt":"a"}', CompletionBody)`
    """
    try:
        raw.decode()
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        body = msgspec.json.decode(raw, type=kind)
        check_supported(fields)
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        message, param = _locate(str(error))
        raise InvalidRequest(message, param=param) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}"[:200]) from None
    return body


def sampling_params(
    body: ChatBody | CompletionBody, *, encoder: Encoder, num_prompt: int, max_model_len: int
) -> SamplingParams:
    """The sampling parameters that a body asks for, OpenAI's defaults filled in.

    Raises InvalidRequest naming the field, ContextLengthExceeded when the prompt leaves no room.
    """
    room = max_model_len - num_prompt
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt's {num_prompt} tokens fill the model's context of {max_model_len}",
            param="messages" if isinstance(body, ChatBody) else "prompt",
        )
    if isinstance(body, ChatBody):
        limit, num_logprobs = body.max_completion_tokens, body.num_logprobs
        max_tokens = _first(limit, body.max_tokens, room)
        renamed = {} if limit is None else {"max_tokens": "max_completion_tokens"}
        renamed["logprobs"] = "top_logprobs"
    else:
        num_logprobs = body.logprobs
        max_tokens = _first(body.max_tokens, min(COMPLETION_MAX_TOKENS, room))
        renamed = {}
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_first(body.temperature, 1.0),
            top_k=0 if body.top_k == -1 else _first(body.top_k, 0),
            top_p=_first(body.top_p, 1.0),
            min_p=_first(body.min_p, 0.0),
            presence_penalty=_first(body.presence_penalty, 0.0),
            frequency_penalty=_first(body.frequency_penalty, 0.0),
            repetition_penalty=_first(body.repetition_penalty, 1.0),
            logit_bias=_logit_bias(body.logit_bias),
            bad_words=_bad_words(body.bad_words or (), encoder),
            allowed_token_ids=(
                None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids)
            ),
            min_tokens=_first(body.min_tokens, 0),
            stop=_stops(body.stop),
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            seed=_seed(body.seed),
            logprobs=num_logprobs,
        )
    except InvalidRequest as error:
        if error.param not in renamed:
            raise
        new = renamed[error.param]
        raise InvalidRequest(str(error).replace(error.param, new, 1), param=new) from None


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """Parameters of the i-th choice: its seed is the request's plus i, or its own draw."""
    if params.seed is None:
        return params
    return replace(params, seed=(params.seed + choice) % SEED_RANGE)


Value = TypeVar("Value")


def _texts(parts: Sequence[ContentPart], where: str) -> list[str]:
    """The text of each part; raises InvalidRequest naming the first that has none."""
    texts: list[str] = []
    for idx, part in enumerate(parts):
        if part.type != "text" or part.text is None:
            raise InvalidRequest("only text parts are supported", param=f"{where}[{idx}]")
        texts.append(part.text)
    return texts


def _first(*values: Value | None) -> Value:
    return next(value for value in values if value is not None)


def _seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    if not -SEED_RANGE // 2 <= seed < SEED_RANGE:
        raise InvalidRequest("seed must fit in 64 bits", param="seed")
    return seed % SEED_RANGE  # clients may send a signed one


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop may hold at most {MAX_STOPS} strings", param="stop")
    return stops


def _logit_bias(biases: dict[str, float] | None) -> dict[int, float]:
    for key in biases or ():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest("logit_bias keys must be token ids", param="logit_bias")
    return {int(key): bias for key, bias in (biases or {}).items()}


def _bad_words(words: Sequence[str], encoder: Encoder) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word as it stands at a text's start and after a space."""
    if not all(words):
        raise InvalidRequest("bad_words must not hold an empty entry", param="bad_words")
    spelled = (text for word in words for text in (word, " " + word.lstrip()))
    return tuple({tuple(encoder.encode(text, add_special_tokens=False)): None for text in spelled})


def _locate(message: str) -> tuple[str, str | None]:
    """Split a msgspec message into what is wrong and the field that it is about.

    Example: "Expected `int`, got `str` - at `$.n`" gives ("n: Expected `int`, got `str`", "n").
    """
    what, _, path = message.partition(" - at `$")
    missing = re.search(r"missing required field `(\w+)`", what)
    names = [path.rstrip("`").lstrip(".")] + ([missing.group(1)] if missing else [])
    param = ".".join(name for name in names if name).removesuffix("[...]")
    return (f"{param}: {what}" if param and not missing else what)[:400], param or None
