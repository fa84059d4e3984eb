"""The routes of text: /tokenize and /detokenize, in the forms of vLLM and of llama.cpp at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specdec.errors import InvalidRequest
from specdec.server.chat_message import ChatMessage
from specdec.server.json_response import json_response
from specdec.server.parsing import parse_struct
from specdec.server.protocol import ChatBody, Int64
from specdec.server.service import Service, service_of
from specdec.tokenizer import Tokenizer


class TokenizeBody(Struct, kw_only=True):
    """Body of POST /tokenize: one of `prompt`, `messages` (vLLM's) and `content` (llama.cpp's)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    content: str | None = None
    add_special_tokens: bool | None = None  # of a prompt: true
    add_special: bool | None = None  # of content: false
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequest unless there is just one text, with options of its own."""
        texts = [self.prompt, self.messages, self.content]
        if sum(text is not None for text in texts) != 1:
            raise InvalidRequest("give one of prompt, messages and content", param="prompt")
        if self.messages is not None:
            if self.add_special_tokens:
                raise InvalidRequest(
                    "the chat template writes the special tokens of messages itself",
                    param="add_special_tokens",
                )
            self.as_chat().check()

    def as_chat(self) -> ChatBody:
        """The messages as a chat would bring them."""
        return ChatBody(
            model=self.model or "",
            messages=self.messages or [],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class Piece(Struct):
    """A token: its id, and the text that it stands for, or its bytes where they are not text."""

    id: int
    piece: str | list[int]


class Tokenized(Struct, kw_only=True):
    """Answer of POST /tokenize; `tokens` are pieces where the request asked for them."""

    count: int
    max_model_len: int
    tokens: Sequence[int | Piece]
    token_strs: list[str] | UnsetType = UNSET  # as the vocabulary spells them


class DetokenizeBody(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[Int64]
    model: str | None = None


class Detokenized(Struct):
    """Answer of POST /detokenize: the same text by both of its names, special tokens shown."""

    prompt: str
    content: str


async def _tokenize(request: Request) -> Response:
    service = service_of(request)
    settings = service.settings
    body = parse_struct(await request.body(), TokenizeBody, strict=settings.strict_params)
    body.check()
    ready = service.check_ready()
    tokenizer = _tokenizer(service, body.model)
    ids = await _ids(service, tokenizer, body)
    answer = Tokenized(count=len(ids), max_model_len=ready.max_model_len, tokens=ids)
    if body.return_token_strs:
        answer.token_strs = [tokenizer.token_text(token_id) for token_id in ids]
    if body.with_pieces:
        answer.tokens = [_piece(tokenizer, token_id) for token_id in ids]
    return json_response(answer)


async def _ids(service: Service, tokenizer: Tokenizer, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        chat = await service.render(body.as_chat())
        return await asyncio.to_thread(tokenizer.encode_rendered, chat.text, chat.mark)
    if body.prompt is not None:
        text, adds_special = body.prompt, body.add_special_tokens is not False
    else:
        text, adds_special = body.content or "", bool(body.add_special)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=adds_special)


def _piece(tokenizer: Tokenizer, token_id: int) -> Piece:
    piece = tokenizer.token_bytes(token_id)
    try:
        return Piece(token_id, piece.decode())
    except UnicodeDecodeError:
        return Piece(token_id, list(piece))


async def _detokenize(request: Request) -> Response:
    service = service_of(request)
    settings = service.settings
    body = parse_struct(await request.body(), DetokenizeBody, strict=settings.strict_params)
    ready = service.check_ready()
    tokenizer = _tokenizer(service, body.model)
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < ready.vocab_size):
        raise InvalidRequest(
            f"tokens: token ids must be at least 0 and below {ready.vocab_size}", param="tokens"
        )
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(Detokenized(text, text))


def _tokenizer(service: Service, model: str | None) -> Tokenizer:
    """The served model's tokenizer; raises ModelNotFound if the request names another model."""
    if model is not None:
        service.check_model(model)
    assert service.tokenizer is not None, "a service that is ready has its tokenizer"
    return service.tokenizer


ROUTES = [
    Route("/tokenize", _tokenize, methods=["POST"]),
    Route("/detokenize", _detokenize, methods=["POST"]),
]
