"""Completions: the older endpoint that evaluation harnesses use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.tokenizer import Tokenizer
from tests.server.script import script

if TYPE_CHECKING:
    from tests.server.conftest import RunningServer


def test_whole_and_streamed(server: RunningServer) -> None:
    create = server.client.completions.create
    whole = create(model="toy", prompt=script("Hello", burst=2))
    assert whole.object == "text_completion"
    assert whole.choices[0].text == "Hello"
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        create(
            model="toy",
            prompt=script("Hello", delay_s=0.01),
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *body, last, totals = chunks
    assert "".join(chunk.choices[0].text for chunk in body) == "Hello"
    assert all(chunk.choices[0].finish_reason is None for chunk in body)
    assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "stop")
    assert totals.choices == []
    assert totals.usage.completion_tokens == 6
    assert {chunk.object for chunk in chunks} == {"text_completion"}


def test_sixteen_tokens_are_the_default(server: RunningServer) -> None:
    answer = server.client.completions.create(model="toy", prompt=script("x" * 50))
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"


def test_token_ids_and_several_prompts(server: RunningServer) -> None:
    create = server.client.completions.create
    ids = [Tokenizer.load(server.folder).encode(script(text)) for text in ("one", "two")]
    assert create(model="toy", prompt=ids[0]).choices[0].text == "one"
    for prompts in (ids, [script("one"), script("two")]):
        answer = create(model="toy", prompt=prompts, n=2, seed=5)
        assert [choice.text for choice in answer.choices] == ["one", "one", "two", "two"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == len(ids[0]) + len(ids[1])
        assert answer.usage.prompt_tokens_details.cached_tokens == 32, "once per prompt"
        assert [note["seed"] for note in server.journal("add")[-4:]] == [5, 6, 5, 6]


def test_logprobs_in_the_older_form(server: RunningServer) -> None:
    create = server.client.completions.create
    prompt = script("né!", delay_s=0.01)
    whole = create(model="toy", prompt=prompt, logprobs=2).choices[0].logprobs
    assert whole.tokens[0] == "n"
    assert len(whole.tokens) == len(whole.token_logprobs) == len(whole.top_logprobs) == 5
    assert whole.tokens[1:3] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert whole.text_offset == [0, 1, 1, 2, 3]
    assert list(whole.top_logprobs[0].values()) == [-0.5, -1.5]
    chunks = list(create(model="toy", prompt=prompt, logprobs=2, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in parts for x in getattr(part, name)] == getattr(whole, name)


def test_the_chosen_token_is_always_among_the_top(server: RunningServer) -> None:
    answer = server.client.completions.create(model="toy", prompt=script("a"), logprobs=0)
    assert answer.choices[0].logprobs.top_logprobs == [{"a": -0.5}, {"<|end|>": -0.5}]
