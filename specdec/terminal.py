"""TokenPrinter: streams text to a terminal, accepted draft tokens in colour."""

from __future__ import annotations

import os
from typing import TextIO

from specdec.generation import Generation
from specdec.request import TokenRecord
from specdec.tree import ROOT_SOURCE

# Underlined as well as green: colour alone excludes some readers.
_DRAFTED, _DIM, _RESET = "\x1b[32;4m", "\x1b[2m", "\x1b[0m"


class TokenPrinter:
    """Prints deltas as they come; plain text where the output is not a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._has_colour = out.isatty() and "NO_COLOR" not in os.environ

    def __call__(self, text: str, token: TokenRecord | None) -> None:
        """Print one token's newly printable text."""
        is_drafted = token is not None and token.sources != (ROOT_SOURCE,)
        if self._has_colour and is_drafted and text:
            text = f"{_DRAFTED}{text}{_RESET}"
        self._out.write(text)
        self._out.flush()

    def close(self, result: Generation) -> None:
        """End the line; on a terminal also say how fast it was."""
        self._out.write("\n")
        if self._has_colour:
            speed = result.decode_tokens_per_second
            self._out.write(
                f"{_DIM}{len(result.tokens)} tokens, first after {result.ttft_s:.2f} s, then "
                f"{'-' if speed is None else format(speed, '.1f')} tokens/s; "
                f"{result.stats.tokens_per_step:.2f} tokens per step, "
                f"{result.stats.num_accepted} of {result.stats.num_draft_tokens} drafts accepted "
                f"(underlined)  [{result.finish_reason}]{_RESET}\n"
            )
        self._out.flush()
