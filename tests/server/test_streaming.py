"""Streams: whatever the bursts, the chunks add up to the answer that is not streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.server.answering import MAX_LINE_LEN
from specdec.tokenizer import Tokenizer
from tests.server.conftest import make_folder
from tests.server.scripted_generation import answers, empty_stats

Json = dict[str, Any]

# Letters that stop strings are made of, and characters of two, three and four bytes.
TEXTS = st.text(st.sampled_from("ab\n é漢😀\u2028"), max_size=24)
STOPS = st.lists(st.text(st.sampled_from("abé漢😀"), min_size=1, max_size=3), max_size=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_folder(tmp_path_factory.mktemp("tokenizer")))


def chunks_of(lines: list[bytes]) -> list[Json]:
    for line in lines:
        assert line.startswith(b"data: ")
        assert line.endswith(b"\n\n")
        assert line.count(b"\n") == 2
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def gathered(choices: list[Json], name: str) -> list[Any]:
    return [item for choice in choices for item in choice.get(name, ())]


def text_of(choice: Json) -> str:
    whole = choice["delta"] if "delta" in choice else choice.get("message", {})
    text = choice.get("text", whole.get("content", ""))
    assert isinstance(text, str)
    return text


def logprobs_of(choices: list[Json], name: str) -> list[Any]:
    return [x for choice in choices if choice["logprobs"] for x in choice["logprobs"][name]]


def expected(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], keeps: bool
) -> tuple[Any, ...]:
    """By decoding everything so far at each token: text, tokens kept, and what ended it."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        if found:
            at, stop = min(found, key=lambda match: match[0])
            return text[: at + len(stop) * keeps], ids[:count], stop
    return tokenizer.decode(ids), ids, None


@given(
    text=TEXTS,
    num_half=st.integers(0, 3),
    stops=STOPS,
    bursts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    num_merged=st.integers(1, 4),
    fields=st.fixed_dictionaries(
        {
            "stream_interval": st.sampled_from([None, "step", "token"]),
            "include_stop_str_in_output": st.booleans(),
            "n": st.integers(1, 2),
            "return_token_ids": st.booleans(),
            "echo": st.booleans(),
            "token_info": st.sampled_from([False, True, {"rejected": True}]),
        }
    ),
    is_chat=st.booleans(),
    has_logprobs=st.booleans(),
)
def test_the_chunks_add_up_to_the_whole_answer(
    tokenizer: Tokenizer,
    text: str,
    num_half: int,
    stops: list[str],
    bursts: list[int],
    num_merged: int,
    fields: Json,
    is_chat: bool,
    has_logprobs: bool,
) -> None:
    ids = tokenizer.encode(text) + tokenizer.encode("😀")[:num_half]  # it ends in half a character
    (eos,) = tokenizer.eos_token_ids
    fields = {
        **fields,
        **({"messages": [{"role": "user", "content": "q"}]} if is_chat else {"prompt": "q"}),
        "stop": stops,
        "max_tokens": 500,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if is_chat or has_logprobs:
        del fields["echo"]
    if has_logprobs:
        fields |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    lines, whole = answers(fields, [*ids, eos], bursts * 200, tokenizer, num_merged)
    *chunks, totals = chunks_of(lines)
    shown, kept, stop = expected(tokenizer, ids, stops, fields["include_stop_str_in_output"])
    kept = kept if stop else [*kept, eos]
    shown = ("q" if fields.get("echo") else "") + shown

    assert totals["choices"] == []
    assert totals["usage"] == whole["usage"]
    assert totals["usage"]["completion_tokens"] == len(kept) * fields["n"]
    assert totals["metrics"] == whole["metrics"]
    so_far = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert so_far == sorted(so_far)
    assert so_far[-1] == len(kept) * fields["n"]
    for index in range(fields["n"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        (one,) = (choice for choice in whole["choices"] if choice["index"] == index)
        assert "".join(map(text_of, parts)) == text_of(one) == shown
        assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert parts[-1]["stop_reason"] == one["stop_reason"] == stop
        assert text_of(parts[-1]) == ""
        if is_chat:
            assert [p["delta"].get("role") for p in parts] == ["assistant"] + [None] * (
                len(parts) - 1
            )
            assert parts[-1]["delta"] == {}
        if fields["return_token_ids"]:
            assert gathered(parts, "token_ids") == one["token_ids"] == kept
        if fields["token_info"]:
            infos = gathered(parts, "token_info")
            assert infos == one["token_info"]
            assert [info["id"] for info in infos] == kept
            for info in infos:
                assert (info["kind"] == "bonus") == (info["sources"] == ["target"])
        if isinstance(fields["token_info"], dict):
            rejected = gathered(parts, "rejected_drafts")
            assert rejected == one["rejected_drafts"]
            assert [r["step"] for r in rejected] == sorted({info["step"] for info in infos})
        if has_logprobs:
            name = "content" if is_chat else "tokens"
            entries = logprobs_of(parts, name)
            assert entries == one["logprobs"][name]
            assert len(entries) == len(kept)
        if fields["stream_interval"] == "token":
            is_opened = is_chat or fields["return_token_ids"]
            assert len(parts) == len(kept) + 1 + is_opened + bool(fields.get("echo"))


def test_a_long_burst_is_split_by_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x" * 900)
    fields = {
        "messages": [{"role": "user", "content": "q"}],
        "logprobs": True,
        "top_logprobs": 2,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 900,
    }
    lines, whole = answers(fields, ids, [900], tokenizer)
    assert max(map(len, lines)) <= MAX_LINE_LEN
    opening, *body, closing, _ = chunks_of(lines)
    assert len(body) > 2
    assert logprobs_of([c["choices"][0] for c in body], "content") == logprobs_of(
        whole["choices"], "content"
    )
    so_far = [chunk["usage"]["completion_tokens"] for chunk in (opening, *body, closing)]
    assert so_far == [*sorted(set(so_far[:-1])), 900], "each part counts its own"


def test_a_short_burst_is_one_chunk(tokenizer: Tokenizer) -> None:
    fields = {"prompt": "q", "max_tokens": 500}
    lines, _ = answers(fields, tokenizer.encode("y" * 500), [500], tokenizer)
    assert len(lines) == 2


def test_a_long_prompt_is_repeated_in_parts(tokenizer: Tokenizer) -> None:
    prompt = "\x01" * 20_000
    lines, whole = answers(
        {"prompt": prompt, "echo": True, "max_tokens": 0, "truncate_prompt_tokens": None},
        [],
        [],
        tokenizer,
    )
    assert max(map(len, lines)) <= MAX_LINE_LEN
    choices = [c for chunk in chunks_of(lines) for c in chunk["choices"]]
    assert "".join(map(text_of, choices)) == prompt == text_of(whole["choices"][0])
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["metrics"]["speculative_decoding"] == empty_stats()
