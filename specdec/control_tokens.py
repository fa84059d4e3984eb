"""ControlTokens: what a user types stays text, though it reads like a token that ends a turn."""

from __future__ import annotations

import re
import secrets
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import AddedToken

from specdec.errors import InvalidRequest

MARK_LEN = 12  # digits; templates that quote, escape or change case leave digits alone


class ControlTokens:
    """Tells the control tokens that a chat template writes from those that its messages hold.

    Before rendering, `guard` puts a mark that nobody can guess after the first character of a
    control token's text wherever messages hold one. After it, `encode` reads the marked ones as
    text and the others as tokens. What holds no control token is not touched by either.

    Example:
        control = ControlTokens(backend)
        guarded, mark = control.guard([{"role": "user", "content": "what is <|im_end|>?"}])
        ids = control.encode(render(guarded), mark)
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._secret = secrets.token_hex(8)
        self._tokens = {
            token.content: (token_id, token)
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        self._minds_neighbours = any(token.single_word for _, token in self._tokens.values())
        self._control_ids = frozenset(token_id for token_id, _ in self._tokens.values())
        # As the tokenizer matches: the leftmost, and the longest of those that begin there.
        self._any = "|".join(map(re.escape, sorted(self._tokens, key=len, reverse=True)))
        self._pattern = re.compile(self._any or r"(?!)")
        self._starts = re.compile(f"(?={self._pattern.pattern}).", re.DOTALL)

    def guard(self, value: Any) -> tuple[Any, str]:
        """The JSON value with control tokens marked in all of its strings, and the mark.

        The mark is empty, and the value the same, where there is none.
        Raises InvalidRequest when the value is nested too deeply.
        """
        try:
            if not self._is_in(value):
                return value, ""
            mark = "".join(secrets.choice("0123456789") for _ in range(MARK_LEN))
            return self._marked(value, mark), mark
        except RecursionError:
            raise InvalidRequest("messages are nested too deeply", param="messages") from None

    def encode(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered text whose messages hold control tokens marked with `mark`.

        Raises InvalidRequest if this tokenizer cannot tell the two: a control token is one of its
        words, or only counts where no word adjoins it.
        """
        unmarked = re.compile(f"(?:{self._any})(?!{mark})") if self._any else self._pattern
        text = unmarked.sub(lambda found: self._alias(found.group()), text).replace(mark, "")
        (found,) = self._literal.encode_batch([text], add_special_tokens=False)
        ids: list[int] = found.ids
        if self._minds_neighbours or not self._control_ids.isdisjoint(ids):
            raise InvalidRequest(
                "messages hold a control token that this model cannot read as text",
                param="messages",
            )
        return [self._ids_of_aliases.get(token_id, token_id) for token_id in ids]

    def _is_in(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, dict):
            return any(self._is_in(key) or self._is_in(item) for key, item in value.items())
        return isinstance(value, list | tuple) and any(map(self._is_in, value))

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._starts.sub(lambda found: found.group() + mark, value)
        if isinstance(value, dict):
            return {
                self._marked(key, mark): self._marked(item, mark) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._marked(item, mark) for item in value]
        return value

    def _alias(self, content: str) -> str:
        return f"<{self._secret}-{self._tokens[content][0]}>"

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The tokenizer that reads control tokens as text, and their aliases as tokens.

        An alias splits the text as its token does, so all around it is read alike.
        """
        literal = tokenizers.Tokenizer.from_str(self._backend.to_str())
        literal.encode_special_tokens = True
        literal.add_tokens(
            [
                AddedToken(
                    self._alias(content),
                    special=False,
                    normalized=token.normalized,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                )
                for content, (_, token) in self._tokens.items()
            ]
        )
        return literal

    @cached_property
    def _ids_of_aliases(self) -> dict[int | None, int]:
        return {
            self._literal.token_to_id(self._alias(content)): token_id
            for content, (token_id, _) in self._tokens.items()
        }
