"""ChatTemplates: a chat as the text of a prompt, through a checkpoint's Jinja template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import CheckpointError, ContextLengthExceeded, InvalidRequest

if TYPE_CHECKING:
    from jinja2 import Template

END_OF_FINAL_MESSAGE = "<<specdec: the final message ends here>>"  # unlikely in any message
MAX_REASON_LEN = 300  # characters of what a template says of itself


class ChatTemplates:
    """A checkpoint's chat templates, Jinja sources by name, rendered in Jinja's sandbox.

    "default" serves chats, "tool_use" those with tools if it is there. `special_tokens`
    (bos_token, eos_token, ...) are what a template may name.

    Example: `ChatTemplates({"default": "{{ messages[0].content }}"}).render(messages)`.
    """

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        source: str | None = None,
        max_len: int | None = None,
    ) -> str:
        """The prompt text of a chat: each message has a role and content.

        `variables` are what else the template reads; `source` is rendered in place of the
        checkpoint's own. `continue_final_message` ends the text inside the last message, for the
        model to go on with, and adds no generation prompt.

        Raises InvalidRequest if the template is missing or refuses, ContextLengthExceeded beyond
        `max_len` characters.
        """
        # Templates test for a key's presence, so a null is the same as no key.
        chat = [{k: v for k, v in message.items() if v is not None} for message in messages]
        if continue_final_message:
            if not chat or not isinstance(chat[-1].get("content"), str):
                raise InvalidRequest("the final message has no text to continue", param="messages")
            # The space shows whether the template trims messages; then the text is trimmed too.
            chat[-1]["content"] += END_OF_FINAL_MESSAGE + " "
        given: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens}
        given |= variables or {}
        given["messages"] = chat
        given["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        if source is None:
            template = self._template(has_tools=bool(given["tools"]))
        else:
            template = _compile_given(source)
        try:
            text = _joined(template, given, max_len)
        except InvalidRequest:
            raise
        except MemoryError:
            raise InvalidRequest(
                "the chat template needs too much memory", param="messages"
            ) from None
        except Exception as error:  # a template fails in as many ways as a program
            raise InvalidRequest(
                f"the chat template refuses these messages: {_reason(error)}", param="messages"
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

    def _template(self, *, has_tools: bool) -> Template:
        name = "tool_use" if has_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise InvalidRequest(
                "this model has no chat template; send a prompt instead of messages",
                param="messages",
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = _compile(self.sources[name])
            except Exception as error:
                raise CheckpointError(
                    f"the chat template is invalid ({_reason(error)}); correct chat_template.jinja"
                ) from error
        return self._compiled[name]


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The sources of a checkpoint by name, from chat_template.jinja or tokenizer_config.json."""
    try:
        template: Any = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if isinstance(template, str) else {}


def _joined(template: Template, variables: Mapping[str, Any], max_len: int | None) -> str:
    pieces: list[str] = []
    length = 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if max_len is not None and length > max_len:
            raise ContextLengthExceeded(
                f"the chat template wrote more than {max_len} characters, "
                "which the model's context cannot hold",
                param="messages",
            )
    return "".join(pieces)


def _reason(error: Exception) -> str:
    """What an error says, on one line, short, and without addresses of memory."""
    line = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"0x[0-9a-fA-F]+", "0x...", line)[:MAX_REASON_LEN]


def _compile_given(source: str) -> Template:
    try:
        return _compile(source)
    except Exception as error:  # of the template language, of Python's compiler, or of its limits
        raise InvalidRequest(
            f"chat_template is not a valid template: {_reason(error)}", param="chat_template"
        ) from error


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
    return environment.from_string(source)
