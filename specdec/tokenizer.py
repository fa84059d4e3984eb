"""Tokenizer: text to token ids and back, and chats through the checkpoint's template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from specdec.checkpoints import read_json
from specdec.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from jinja2 import Template

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
END_OF_FINAL_MESSAGE = "<<specdec: the final message ends here>>"  # unlikely in any message


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
        self._templates = (
            {"default": chat_template} if isinstance(chat_template, str) else chat_template or {}
        )
        self._compiled: dict[str, Template] = {}
        self._special_tokens = dict(special_tokens or {})
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
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
            chat_template=_read_template(folder, config),
            special_tokens=special_tokens,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidRequest if it is not valid Unicode."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # a lone surrogate, which JSON can carry
            raise InvalidRequest("text holds a lone surrogate; send valid Unicode") from None

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

    def is_hidden(self, token_id: int) -> bool:
        """Whether `decode` leaves this token out: it is special, empty, or no token at all."""
        return token_id in self._special_ids or not self._backend.id_to_token(token_id)

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
        # Templates test for a key's presence, so a null is the same as no key.
        chat = [{k: v for k, v in message.items() if v is not None} for message in messages]
        if continue_final_message:
            if not chat or not isinstance(chat[-1].get("content"), str):
                raise InvalidRequest("the final message has no text to continue", param="messages")
            # The space shows whether the template trims messages; then the text is trimmed too.
            chat[-1]["content"] += END_OF_FINAL_MESSAGE + " "
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        variables |= template_kwargs
        variables["messages"] = chat
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        template = self._template(has_tools=bool(variables["tools"]))
        try:
            text = template.render(variables)
        except Exception as error:  # a template fails in as many ways as a program
            reason = " ".join(str(error).split())
            raise InvalidRequest(
                f"the chat template refuses these messages: {reason}", param="messages"
            ) from error
        if not continue_final_message:
            return text
        text, found, rest = text.rpartition(END_OF_FINAL_MESSAGE)
        if not found:
            raise InvalidRequest(
                "the chat template changes the final message, so it cannot be continued",
                param="messages",
            )
        return text if rest.startswith(" ") else text.rstrip()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of `render_chat`; the template writes its special tokens itself."""
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def _template(self, *, has_tools: bool) -> Template:
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "this model has no chat template; send a prompt instead of messages",
                param="messages",
            )
        if name not in self._compiled:
            self._compiled[name] = _compile(self._templates[name])
        return self._compiled[name]


def _compile(source: str) -> Template:
    """Compile a chat template in the environment that templates are written for."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it only groups."""

        tags = {"generation"}  # noqa: RUF012  # as the base class declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise CheckpointError(
            f"the chat template is invalid ({error}); correct chat_template.jinja"
        ) from error


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template if isinstance(template, str) else None


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(token: object) -> str | None:
    """A special token as configs write it: its text, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
