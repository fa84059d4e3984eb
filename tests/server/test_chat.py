"""Chat completions through the official client, streamed and whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.server.script import say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.conftest import RunningServer


def stream(
    server: RunningServer, text: str, *, directives: dict[str, Any] | None = None, **fields: Any
) -> Iterator[Any]:
    chunks: Iterator[Any] = server.client.chat.completions.create(
        model="toy", messages=say(text, **(directives or {})), stream=True, **fields
    )
    return chunks


def deltas(chunks: list[Any], index: int = 0) -> list[str]:
    choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
    return [c.delta.content for c in choices if c.delta.content is not None]


def test_an_answer(server: RunningServer) -> None:
    answer = server.client.chat.completions.create(model="toy", messages=say("Hello", burst=3))
    assert answer.object == "chat.completion"
    assert answer.model == "toy"
    (choice,) = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello"
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert usage.completion_tokens == 6, "the end token counts"
    assert usage.total_tokens == usage.prompt_tokens + 6
    assert usage.prompt_tokens_details.cached_tokens == 16
    assert answer.metrics["speculative_decoding"]["num_spec_steps"] == 2


def test_the_sequence_of_chunks(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        stream(server, "Hello", directives={"burst": 2, "delay_s": 0.03}, stream_options=options)
    )
    assert [c.usage.completion_tokens for c in chunks] == [0, 2, 4, 6, 6, 6]
    first, *body, last, totals = chunks
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert first.object == "chat.completion.chunk"
    assert first.choices[0].delta.model_dump(exclude_unset=True) == {
        "role": "assistant",
        "content": "",
    }
    assert [c.choices[0].delta.model_dump(exclude_unset=True) for c in body] == [
        {"content": "He"},
        {"content": "ll"},
        {"content": "o"},
    ], "a step's tokens travel in one chunk, and the role only in the first"
    assert last.choices[0].delta.model_dump(exclude_unset=True) == {}
    assert [c.choices[0].finish_reason for c in [first, *body, last]] == [None] * 4 + ["stop"]
    assert totals.choices == []
    assert totals.usage.completion_tokens == 6
    assert totals.metrics["speculative_decoding"]["accepted_by_source"] == {"script": 3}


def test_the_raw_stream(server: RunningServer) -> None:
    body = {"model": "toy", "messages": say("Hi"), "stream": True}
    answer = server.post("/v1/chat/completions", body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    *chunks, done = answer.events
    assert done == "[DONE]"
    for chunk in chunks:
        assert set(chunk) == {
            *("id", "object", "created", "model", "system_fingerprint", "choices")
        }, "no usage unasked"
        assert {"index", "delta", "logprobs", "finish_reason"} <= set(chunk["choices"][0])
    body["stream_options"] = {"include_usage": True}
    *chunks, totals, done = server.post("/v1/chat/completions", body).events
    assert all(chunk["usage"] is None for chunk in chunks)
    assert totals["choices"] == []
    assert totals["usage"]["completion_tokens"] == 3


def test_the_stream_helper(server: RunningServer) -> None:
    with server.client.chat.completions.stream(
        model="toy", messages=say("Hello", burst=2), stream_options={"include_usage": True}
    ) as events:
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    assert "content.delta" in kinds
    assert "content.done" in kinds
    assert final.choices[0].message.content == "Hello"
    assert final.choices[0].finish_reason == "stop"
    assert final.usage.completion_tokens == 6


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "naïve 漢字",
        "👩\u200d👩\u200d👧 fam\u0301ily",
        "\u2028line\u0085end\u2029",
        'a\x00\\"b',
    ],
)
@pytest.mark.parametrize("burst", [1, 3])
def test_the_deltas_add_up_to_the_whole_answer(
    server: RunningServer, text: str, burst: int
) -> None:
    directives = {"burst": burst, "delay_s": 0.001}
    whole = server.client.chat.completions.create(model="toy", messages=say(text, **directives))
    assert whole.choices[0].message.content == text
    assert "".join(deltas(list(stream(server, text, directives=directives)))) == text


def test_line_ends_of_unicode_are_escaped(server: RunningServer) -> None:
    text = "a\u2028b\u2029c\u0085d"
    for streamed in (False, True):
        body = {"model": "toy", "messages": say(text), "stream": streamed}
        answer = server.post("/v1/chat/completions", body)
        assert not set(answer.text) & set("\u2028\u2029\u0085")
        assert "\\u2028" in answer.text


@pytest.mark.parametrize("burst", [1, 2, 50])
def test_a_stop_string_is_cut_wherever_the_deltas_fall(server: RunningServer, burst: int) -> None:
    directives = {"burst": burst, "delay_s": 0.01}
    fields = {"stop": ["STOP", "never"]}
    chunks = list(stream(server, "go on S STO STOP and more", directives=directives, **fields))
    whole = server.client.chat.completions.create(
        model="toy", messages=say("go on S STO STOP and more", **directives), **fields
    )
    assert "".join(deltas(chunks)) == "go on S STO " == whole.choices[0].message.content
    for choice in (whole.choices[0], chunks[-1].choices[0]):
        assert choice.finish_reason == "stop"
        assert choice.stop_reason == "STOP"
    assert whole.usage.completion_tokens == len("go on S STO STOP")


def test_text_held_back_for_a_stop_string_comes_at_the_end(server: RunningServer) -> None:
    chunks = list(stream(server, "almost STO", stop="STOP"))
    assert "".join(deltas(chunks)) == "almost STO"
    assert chunks[-1].choices[0].stop_reason is None


def test_a_stop_token_has_no_text(server: RunningServer) -> None:
    (exclamation,) = token_ids(server, "!")
    answer = server.client.chat.completions.create(
        model="toy", messages=say("Hi! there"), extra_body={"stop_token_ids": [exclamation]}
    )
    assert answer.choices[0].message.content == "Hi"
    assert answer.choices[0].stop_reason == exclamation
    assert answer.usage.completion_tokens == 3


def token_ids(server: RunningServer, text: str) -> list[int]:
    from specdec.tokenizer import Tokenizer

    return Tokenizer.load(server.folder).encode(text)


def test_the_limit_on_tokens(server: RunningServer) -> None:
    chunks = list(stream(server, "Hello", max_completion_tokens=3))
    assert "".join(deltas(chunks)) == "Hel"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_two_choices(server: RunningServer) -> None:
    chunks = list(
        stream(
            server,
            "twice",
            directives={"delay_s": 0.01},
            n=2,
            seed=2**63 - 1,
            stream_options={"include_usage": True},
        )
    )
    for index in (0, 1):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(deltas(chunks, index)) == "twice"
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert chunks[-1].usage.completion_tokens == 12, "both choices count"
    assert chunks[-1].usage.prompt_tokens == len('user:[[{"delay_s": 0.01}]]twice\nassistant:')
    assert chunks[-1].metrics["speculative_decoding"]["num_spec_steps"] == 12, "of both"
    assert [note["seed"] for note in server.journal("add")[-2:]] == [2**63 - 1, 2**63]

    whole = server.client.chat.completions.create(model="toy", messages=say("twice"), n=2)
    assert [c.message.content for c in whole.choices] == ["twice", "twice"]
    assert [c.index for c in whole.choices] == [0, 1]
    assert [note["seed"] for note in server.journal("add")[-2:]] == [None, None]


def test_logprobs_have_an_entry_for_every_token(server: RunningServer) -> None:
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = server.client.chat.completions.create(
        model="toy", messages=say("né", burst=3), **fields
    )
    chunks = list(stream(server, "né", directives={"burst": 3}, **fields))
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    entries = whole.choices[0].logprobs.content
    assert streamed == entries
    assert len(entries) == whole.usage.completion_tokens == 4
    assert entries[0].token == "n"
    assert entries[0].bytes == [ord("n")]
    assert entries[0].logprob == -0.5
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.5, -1.5]
    assert [entry.bytes for entry in entries[1:3]] == [[0xC3], [0xA9]], "parts of a character"
    assert entries[3].token == "<|end|>"
    no_top = server.client.chat.completions.create(model="toy", messages=say("a"), logprobs=True)
    assert [len(e.top_logprobs) for e in no_top.choices[0].logprobs.content] == [0, 0]


def test_the_engine_is_told_what_the_request_says(server: RunningServer) -> None:
    limits = {"max_nodes": 4, "max_depth": 2, "drafters": ["suffix"]}
    extra = {"priority": -3, "cache_salt": "s", "speculation": {"enabled": True, **limits}}
    server.client.chat.completions.create(model="toy", messages=say("a"), extra_body=extra)
    assert server.journal("add")[-1] | {"id": None, "used_seed": None} == {
        "what": "add",
        "id": None,
        "seed": None,
        "used_seed": None,
        "is_shadow": False,
        "speculation": limits,
        "priority": -3,
        "cache_salt": "s",
    }
