"""Provenance: which drafter guessed a token, and which guesses were wrong, as answers show them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from specdec.request import RejectedNode, TokenRecord
from specdec.tokenizer import Tokenizer

TARGET = "target"  # the source of a bonus token


class TokenInfo(Struct, frozen=True):
    """Where an output token came from: a node of a draft tree, or the target itself.

    `sources` are the drafters that guessed it, or "target"; `depth` (from 1) is its place in the
    step's tree, and `step` counts the decode steps of its choice from 0.
    """

    id: int
    text: str  # what the token alone decodes to
    bytes: tuple[int, ...]  # of its UTF-8, which may be a part of a character
    sources: tuple[str, ...]
    kind: Literal["accepted", "bonus"]
    depth: int
    step: int

    @classmethod
    def of(cls, record: TokenRecord, tokenizer: Tokenizer) -> TokenInfo:
        """The provenance of an output token."""
        return cls(
            record.token_id,
            token_text(record.token_id, tokenizer),
            tuple(tokenizer.token_bytes(record.token_id)),
            record.sources,
            "bonus" if record.sources == (TARGET,) else "accepted",
            record.depth,
            record.step,
        )


class RejectedDraft(Struct, frozen=True):
    """A draft node that was verified and did not become output."""

    step: int
    depth: int
    id: int
    text: str
    sources: tuple[str, ...]

    @classmethod
    def of(cls, node: RejectedNode, tokenizer: Tokenizer) -> RejectedDraft:
        """The form of a rejected node."""
        text = token_text(node.token_id, tokenizer)
        return cls(node.step, node.depth, node.token_id, text, node.sources)


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """What a token alone decodes to, special ones too; half a character is U+FFFD.

    Example: `token_text(0, tokenizer)` may be `"<|endoftext|>"`.
    """
    return tokenizer.decode([token_id], skip_special_tokens=False)
