"""Tokenizer: text to token ids and back, and chats through the checkpoint's template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specdec.chat_template import ChatTemplates, read_templates
from specdec.checkpoints import read_json
from specdec.control_tokens import ControlTokens
from specdec.errors import CheckpointError, InvalidRequest

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# How byte-level vocabularies spell bytes: printable ones as themselves, the others from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
_BYTE_OF = {chr(x): x for x in _PRINTABLE} | {chr(256 + i): x for i, x in enumerate(_OTHERS)}
_FALLBACK = re.compile("<0x[0-9A-F]{2}>")  # a byte in vocabularies of characters
LONE_SURROGATE = "text holds a lone surrogate; send valid Unicode"


class Tokenizer:
    """A checkpoint's tokenizer.json and chat template.

    `special_tokens` (bos_token, eos_token, ...) are what the template may name. `chat_template` is
    Jinja source, or sources by name, of which "tool_use" serves chats with tools if present.

    Example: `Tokenizer.load(folder).encode("Hello")`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        # A tokenizer.json may carry its training's limits; a prompt is never cut or padded.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        if isinstance(chat_template, str):
            chat_template = {"default": chat_template}
        self.templates = ChatTemplates(chat_template or {}, special_tokens)
        self.control = ControlTokens(backend)
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._spelled_ids = frozenset(token_id for token, token_id in vocabulary.items() if token)
        self._added_ids = frozenset(backend.get_added_tokens_decoder())
        self._is_byte_level = "ByteLevel" in repr(backend.decoder)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = eos_token_ids

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer in `folder`. Raises CheckpointError if it is missing or damaged.

        The eos ids are those of generation_config.json, config.json and tokenizer_config.json.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json; add it to the checkpoint")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} is damaged ({error}); download it again") from error
        config = _read_optional(folder / "tokenizer_config.json")
        special_tokens = {
            name: token
            for name in SPECIAL_TOKENS
            if (token := _token_text(config.get(name))) is not None
        }
        eos: list[Any] = []
        for file_name in ("generation_config.json", "config.json"):
            ids = _read_optional(folder / file_name).get("eos_token_id")
            eos += ids if isinstance(ids, list) else [ids]
        eos.append(backend.token_to_id(special_tokens.get("eos_token", "")))
        return cls(
            backend,
            eos_token_ids=tuple(dict.fromkeys(x for x in eos if isinstance(x, int))),
            chat_template=read_templates(folder, config),
            special_tokens=special_tokens,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidRequest if it is not valid Unicode."""
        try:
            # One alone would hold Python's lock, and with it every other thread, until it is done.
            (found,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except TypeError:  # a lone surrogate, which JSON can carry
            raise InvalidRequest(LONE_SURROGATE) from None
        return found.ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def first_difference(self, other: Tokenizer) -> tuple[int, str | None, str | None] | None:
        """The first token id that the two tokenizers read differently, and how each reads it.

        None where they agree on every id that both have; one may have more, as padding does.
        """
        sizes = [t._backend.get_vocab_size(with_added_tokens=True) for t in (self, other)]
        for token_id in range(min(sizes)):
            ours, theirs = (t._backend.id_to_token(token_id) for t in (self, other))
            if ours != theirs:
                return token_id, ours, theirs
        return None

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary spells it, such as "Ġthe"; empty for no token at all."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for: text as UTF-8, or a part of a character's bytes.

        Example: `b"".join(map(tokenizer.token_bytes, ids))` is the text of `ids`, special tokens
        shown; a tokenizer that puts a space before every text shows that too.
        """
        token = self.token_text(token_id)
        if token_id in self._added_ids:
            return token.encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF[char] for char in token if char in _BYTE_OF)
        if _FALLBACK.fullmatch(token):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def is_hidden(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` leaves this token out: it is special, empty, or no token at all."""
        is_skipped = skip_special_tokens and token_id in self._special_ids
        return is_skipped or token_id not in self._spelled_ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of a chat: each message has a role and content.

        `continue_final_message` ends the text inside the last message, for the model to go on with,
        and adds no generation prompt. Raises InvalidRequest if the template is missing or refuses.

        Example: `render_chat([{"role": "user", "content": "Hi"}])`.
        """
        return self.templates.render(
            messages,
            template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of `render_chat`; the template writes its special tokens itself.

        Those that the messages hold are read as text: whoever writes them ends no turn.
        """
        (messages, template_kwargs), mark = self.control.guard((messages, template_kwargs))
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_kwargs,
        )
        return self.encode_rendered(text, mark)

    def encode_rendered(self, text: str, mark: str = "") -> list[int]:
        """Token ids of a text that a chat template wrote; `mark` is that of `control.guard`."""
        if not mark:
            return self.encode(text, add_special_tokens=False)
        try:
            return self.control.encode(text, mark)
        except TypeError:
            raise InvalidRequest(LONE_SURROGATE) from None


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(token: object) -> str | None:
    """A special token as configs write it: its text, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
