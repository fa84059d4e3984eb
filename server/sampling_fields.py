"""Sampling fields: the way from a request's body to SamplingParams."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from specdec.errors import ContextLengthExceeded, InvalidRequest
from specdec.params import SEED_RANGE, SamplingParams
from specdec.server.protocol import ChatBody, CompletionBody, Encoder

MAX_STOPS = 4
MAX_STOP_LEN = 1024  # characters; every token looks for the start of one
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LEN = 1024  # characters
MAX_LOGIT_BIAS = 100.0
COMPLETION_MAX_TOKENS = 16  # what the completions endpoint gives a client that asks for nothing

Value = TypeVar("Value")


def sampling_params(
    body: ChatBody | CompletionBody,
    *,
    encoder: Encoder,
    num_prompt: int,
    max_model_len: int,
    eos_token_ids: Collection[int] = (),
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
    renamed = {}
    if body.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    if isinstance(body, ChatBody):
        num_logprobs, unlimited = body.num_logprobs, room
        renamed["logprobs"] = "top_logprobs"
    else:
        num_logprobs, unlimited = body.logprobs, min(COMPLETION_MAX_TOKENS, room)
    max_tokens = _first(body.token_limit, unlimited)
    if isinstance(body, CompletionBody) and body.is_echo_alone:
        max_tokens = 1  # which is not asked of the engine
    try:
        params = SamplingParams(
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
            skip_special_tokens=body.skip_special_tokens is not False,
            seed=_seed(body.seed),
            logprobs=num_logprobs,
        )
    except InvalidRequest as error:
        if error.param not in renamed:
            raise
        new = renamed[error.param]
        raise InvalidRequest(str(error).replace(error.param, new, 1), param=new) from None
    _check_something_is_left(params, eos_token_ids)
    return params


def least_room(body: ChatBody | CompletionBody) -> int:
    """Tokens of output that a prompt must leave room for, as far as the body says.

    Example: a completion that asks for nothing wants room for 16.
    """
    unasked = 1 if isinstance(body, ChatBody) else COMPLETION_MAX_TOKENS
    return unasked if body.token_limit is None else body.token_limit


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """Parameters of the i-th choice: its seed is the request's plus i, or its own draw."""
    if params.seed is None:
        return params
    return replace(params, seed=(params.seed + choice) % SEED_RANGE)


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
    if any(len(text) > MAX_STOP_LEN for text in stops):
        raise InvalidRequest(
            f"stop strings may have at most {MAX_STOP_LEN} characters", param="stop"
        )
    return stops


def _logit_bias(biases: dict[str, float] | None) -> dict[int, float]:
    for key, bias in (biases or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest("logit_bias keys must be token ids", param="logit_bias")
        if not abs(bias) <= MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias values must be between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}",
                param="logit_bias",
            )
    return {int(key): bias for key, bias in (biases or {}).items()}


def _bad_words(words: Sequence[str], encoder: Encoder) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word as it stands at a text's start and after a space."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words may hold at most {MAX_BAD_WORDS}", param="bad_words")
    if any(len(word) > MAX_BAD_WORD_LEN for word in words):
        raise InvalidRequest(
            f"bad_words may have at most {MAX_BAD_WORD_LEN} characters each", param="bad_words"
        )
    if not all(words):
        raise InvalidRequest("bad_words must not hold an empty entry", param="bad_words")
    spelled = (text for word in words for text in (word, " " + word.lstrip()))
    return tuple({tuple(encoder.encode(text, add_special_tokens=False)): None for text in spelled})


def _check_something_is_left(params: SamplingParams, eos_token_ids: Collection[int]) -> None:
    """Raise InvalidRequest where no first token could be chosen whatever the model says."""
    if params.allowed_token_ids is None:
        return
    banned = {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens > 0:
        banned |= {*eos_token_ids, *params.stop_token_ids}
    if params.allowed_token_ids <= banned:
        raise InvalidRequest(
            "allowed_token_ids: bad_words and min_tokens ban every one of them",
            param="allowed_token_ids",
        )
