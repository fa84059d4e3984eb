"""Text: deltas equal the whole decoding, characters stay whole, stop strings never show."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from specdec.text import Detokenizer, StopMatcher, TextStream
from specdec.tokenizer import Tokenizer

# GPT-2's way to write a byte as a printable character.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
SPELLING = {byte: chr(byte) for byte in PRINTABLE}
SPELLING |= {
    byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in SPELLING)
}

# Single bytes 0 to 255 under their own id, then tokens that begin and end inside characters.
PIECES = [bytes([byte]) for byte in range(256)]
PIECES += [b" the", b"STOP", b"ab\n", "é".encode(), "\ufffd".encode(), b"\x82\xac\xe2", b"\xff\xfe"]
PIECES += ["😀".encode()[:3], "😀".encode()[2:], b"a\xf0\x9f", b"\x98\x80b", b"\x80\x80"]
EOS = len(PIECES)
ID_OF = {piece: token_id for token_id, piece in enumerate(PIECES)}


class CountingTokenizer(Tokenizer):
    """Counts the tokens it decodes."""

    num_decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


def byte_level() -> CountingTokenizer:
    names = {"".join(SPELLING[byte] for byte in piece): i for i, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(models.BPE(names, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return CountingTokenizer(backend)


def byte_fallback() -> Tokenizer:
    words = ["\u2581", "\u2581the", "STOP", "\u2581\u2581", "x"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend)


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
WORD_IDS = range(256, 261)

any_ids = st.lists(st.integers(0, EOS + 3), max_size=120)
tricky_ids = st.lists(
    st.sampled_from([0x61, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x80, 0xFF, *range(256, EOS + 2)]),
    max_size=120,
)
some_text = st.text(st.sampled_from("aSTOP€é😀👩\u200d\n ") | st.characters(codec="utf-8"))


def ids_of(text: str) -> list[int]:
    return list(text.encode())


@settings(deadline=None)
@given(any_ids | tricky_ids | some_text.map(ids_of))
@example([ID_OF[b"\x82\xac\xe2"]] * 100)  # every token ends inside a character
@example([0xFF] * 100)
@example([0x80] * 40 + [0xF0, 0x9F, 0x98, 0x80])
def test_deltas_and_flush_are_the_decoded_text(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    shown = ""
    for count, token_id in enumerate(ids, 1):
        shown += detokenizer.push(token_id)
        so_far = BYTE_LEVEL.decode(ids[:count])
        assert so_far.startswith(shown)
        assert shown.startswith(so_far.rstrip("\ufffd"))  # nothing complete waits
        assert len(so_far) - len(shown) <= 3
    assert shown + detokenizer.flush() == BYTE_LEVEL.decode(ids)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(WORD_IDS) | some_text.map(ids_of), max_size=30),
    st.sampled_from([[], [0xE2], [0xE2, 0x82], [0xF0, 0x9F, 0x98], [0xFF]]),
)
def test_byte_fallback_deltas_are_the_decoded_text(
    parts: list[int | list[int]], cut_short: list[int]
) -> None:
    ids = [x for part in parts for x in ([part] if isinstance(part, int) else part)]
    ids += [WORD_IDS[-1], *cut_short]
    detokenizer = Detokenizer(BYTE_FALLBACK)
    shown = "".join(detokenizer.push(token_id) for token_id in ids)
    assert not shown.endswith("\ufffd") or not cut_short
    assert shown + detokenizer.flush() == BYTE_FALLBACK.decode(ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 260), max_size=100))
def test_byte_fallback_survives_any_tokens(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTE_FALLBACK)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert len(text) == len(BYTE_FALLBACK.decode(ids))


def test_a_character_is_never_shown_in_halves() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    deltas = [detokenizer.push(byte) for byte in "a€😀".encode()]
    assert deltas == ["a", "", "", "€", "", "", "", "😀"]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_invalid_utf8_is_not_held_for_ever(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.push(token_id) for token_id in "€".encode())
    assert shown == "€"
    shown = "".join(detokenizer.push(0xFF) for _ in range(100))
    assert 97 <= len(shown) <= 102


@pytest.mark.parametrize("token_id", [0x61, 0xFF, ID_OF[b"\x82\xac\xe2"], EOS])
def test_cost_of_a_push_does_not_grow(token_id: int) -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    for _ in range(2000):
        detokenizer.push(token_id)
    assert tokenizer.num_decoded < 2000 * 36


def first_stop(ids: list[int], stops: tuple[str, ...]) -> tuple[int, str, str | None]:
    """By definition: how many tokens until a stop string, the text before it, and which one."""
    for count in range(1, len(ids) + 1):
        text = BYTE_LEVEL.decode(ids[:count])
        if found := [(text.find(stop), i) for i, stop in enumerate(stops) if stop in text]:
            at, which = min(found)
            return count, text[:at], stops[which]
    return len(ids) + 1, BYTE_LEVEL.decode(ids), None


stop_strings = st.lists(
    st.text(st.sampled_from("ab\nSTOP€😀 "), min_size=1, max_size=4), max_size=3
).map(tuple)
stoppable_ids = st.lists(
    st.sampled_from([*b"ab\nSTOP ", 0xE2, 0x82, 0xAC, 0xFF, *range(256, EOS + 1)]), max_size=60
) | st.text(st.sampled_from("ab\nSTOP€😀 ")).map(ids_of)


@settings(deadline=None)
@given(stoppable_ids, stop_strings)
@example(ids_of("abab\nSTOP"), ("ab\nS", "ba"))
@example([*ids_of("aaaab")], ("aab",))
def test_shown_text_ends_before_the_first_stop(ids: list[int], stops: tuple[str, ...]) -> None:
    count, expected, stopped_by = first_stop(ids, stops)
    matcher, stream = StopMatcher(BYTE_LEVEL, stops), TextStream(BYTE_LEVEL, stops)
    shown = ""
    for pushed, token_id in enumerate(ids, 1):
        assert matcher.push(token_id) == (pushed >= count)
        shown += stream.push(token_id)
        assert expected.startswith(shown)
        assert (stream.stopped_by is not None) == (pushed >= count)
        if pushed < count:  # no more is held back than a stop string may need
            longest = max((len(stop) for stop in stops), default=1)
            assert len(shown) >= len(BYTE_LEVEL.decode(ids[:pushed])) - (longest - 1) - 3
    assert shown + stream.finish() == expected
    assert stream.stopped_by == stopped_by


def test_a_stop_string_may_span_tokens_and_start_inside_one() -> None:
    stream = TextStream(BYTE_LEVEL, ("b\nS",))
    assert stream.push(ID_OF[b"ab\n"]) == "a"
    assert stream.push(ID_OF[b"STOP"]) == ""
    assert stream.stopped_by == "b\nS"
    assert stream.push(0x61) == ""
    assert stream.finish() == ""


def test_what_looked_like_a_stop_string_is_shown_when_it_is_none() -> None:
    stream = TextStream(BYTE_LEVEL, ("STOP!",))
    assert [stream.push(ID_OF[b"STOP"]), stream.push(0x61)] == ["", "STOPa"]
    assert stream.push(ID_OF[b"STOP"]) == ""
    assert stream.finish() == "STOP"
    assert stream.stopped_by is None


def test_a_stop_string_in_the_held_back_bytes_is_found_at_the_end() -> None:
    stream = TextStream(BYTE_LEVEL, ("\ufffd",))
    assert stream.push(0x61) + stream.push(0xE2) == "a"
    assert stream.finish() == ""
    assert stream.stopped_by == "\ufffd"


def test_nothing_stops_before_min_tokens() -> None:
    stream = TextStream(BYTE_LEVEL, ("b",), min_tokens=3)
    matcher = StopMatcher(BYTE_LEVEL, ("b",), min_tokens=3)
    ids = [BYTE_LEVEL.encode(letter)[0] for letter in "abab"]
    assert [matcher.push(i) for i in ids] == [False, False, False, True]
    assert "".join(stream.push(i) for i in ids) + stream.finish() == "aba"
    assert stream.stopped_by == "b"
