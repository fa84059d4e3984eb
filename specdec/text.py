"""Text: token ids to text as they arrive, and stop strings found in it.

Detokenizer    token ids to deltas, never half a character
TextStream     deltas that are safe to show, cut before a stop string
StopMatcher    whether a stop string has come
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_CHAR_BYTES = 4  # of UTF-8, so a character is complete within four tokens
CONTEXT = 8  # tokens kept before new ones; decoders look back at most one character
MAX_WINDOW = 4 * CONTEXT


class Detokenizer:
    """Turns tokens into text one by one; the deltas and `flush` together equal `decode` of all.

    Only a window of recent tokens is decoded, so a push costs the same at any length. What is held
    back is the end of the text while it may be an incomplete character: three U+FFFD at most. (A
    decoder with byte fallback replaces a whole run of byte tokens once one of them is invalid; the
    characters of that run which were complete have then been shown.)

    Example: `delta = detokenizer.push(token_id)`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._ids: list[int] = []  # the window
        self._shown = ""  # text of the window that was returned already
        self._num_waiting = 0  # tokens since all of the text was complete

    def push(self, token_id: int) -> str:
        """Take a token; returns the text that became printable, maybe none."""
        if self._tokenizer.is_hidden(token_id, skip_special_tokens=self._skips):
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        num_held = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_CHAR_BYTES - 1)
        self._num_waiting = self._num_waiting + 1 if num_held else 0
        if 0 < self._num_waiting < MAX_CHAR_BYTES and not text.startswith(self._shown):
            return ""  # byte fallback: the run is invalid until its last character is complete
        delta = text[len(self._shown) : len(text) - num_held]
        self._slide(text, max(len(self._shown), len(text) - num_held))
        return delta

    def flush(self) -> str:
        """The text still held back; call once, after the last push."""
        text = self._decode(self._ids)
        start, self._shown = len(self._shown), text
        return text[start:]

    def _slide(self, text: str, num_shown: int) -> None:
        """Record what was shown of the window's text and drop tokens that are too old."""
        if len(self._ids) >= 2 * CONTEXT and (
            self._num_waiting == 0 or len(self._ids) >= MAX_WINDOW
        ):
            num_held = len(text) - num_shown
            for size in range(CONTEXT, CONTEXT + MAX_CHAR_BYTES):
                tail = self._decode(self._ids[-size:])
                if text.endswith(tail):  # else the cut is inside a character: try the next
                    break
            del self._ids[:-size]
            text, num_shown = tail, len(tail) - num_held
        self._shown = text[:num_shown]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips)


class TextStream:
    """A request's text for whoever shows it: all deltas together are the text before the stop.

    Text that may be the start of a stop string is held back until it is known not to be one. The
    text of the first `min_tokens - 1` tokens is shown whatever it holds: nothing stops there.
    `keeps_stop` shows the stop string itself too.

    Example: `TextStream(tokenizer, ("\\n\\n",))`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        keeps_stop: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._num_free = max(0, min_tokens - 1)  # tokens still to come that cannot stop
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Take a token; returns the text that is safe to show, none once stopped."""
        if self.stopped_by is not None:
            return ""
        delta = self._detokenizer.push(token_id)
        if self._num_free > 0:
            self._num_free -= 1
            return delta
        return self._show(delta, is_last=False)

    def finish(self) -> str:
        """The text still held back, cut before a stop string; call once, after the last push."""
        if self.stopped_by is not None:
            return ""
        return self._show(self._detokenizer.flush(), is_last=True)

    def _show(self, delta: str, *, is_last: bool) -> str:
        text = self._held + delta
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, self.stopped_by = min(found, key=lambda match: match[0])
            self._held = ""
            return text[: end + len(self.stopped_by) if self._keeps_stop else end]
        end = len(text) - (0 if is_last else self._num_ambiguous(text))
        self._held = text[end:]
        return text[:end]

    def _num_ambiguous(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string starts with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class StopMatcher:
    """Tells whether a request's text contains a stop string, also one that spans tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...],
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._stream = TextStream(
            tokenizer, stops, min_tokens=min_tokens, skip_special_tokens=skip_special_tokens
        )

    def push(self, token_id: int) -> bool:
        """Take a token; True once the text so far contains a stop string."""
        self._stream.push(token_id)
        return self._stream.stopped_by is not None
