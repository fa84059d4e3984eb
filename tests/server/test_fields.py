"""Fields of both bodies over HTTP: what each of them changes in the answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest

from specdec.tokenizer import Tokenizer
from tests.server.conftest import Answer, RunningServer
from tests.server.script import script

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(server: RunningServer, text: str, **fields: Any) -> Answer:
    messages = [{"role": "user", "content": text}]
    return server.post(CHAT, {"model": "toy", "messages": messages, **fields})


def complete(server: RunningServer, prompt: Any, **fields: Any) -> Answer:
    return server.post(COMPLETIONS, {"model": "toy", "prompt": prompt, **fields})


@cache
def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def text_of(server: RunningServer, ids: list[int]) -> str:
    return tokenizer_of(server.folder).decode(ids, skip_special_tokens=False)


def test_the_prompt_is_repeated(server: RunningServer) -> None:
    prompt = script("ab")
    whole = complete(server, prompt, echo=True).json
    assert whole["choices"][0]["text"] == prompt + "ab"
    assert whole["usage"]["completion_tokens"] == 3
    *chunks, _ = complete(server, prompt, echo=True, stream=True).events
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts[0].startswith(prompt)
    assert "".join(texts) == prompt + "ab"
    ids = tokenizer_of(server.folder).encode(prompt)
    assert complete(server, ids, echo=True).json["choices"][0]["text"] == prompt + "ab"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_the_prompt_alone_needs_no_engine(server: RunningServer, limit: str) -> None:
    num_asked = len(server.journal("add")) if (server.folder / "journal.jsonl").exists() else 0
    fields = {"echo": True, limit: 0, "n": 2}
    whole = complete(server, ["ab", "cd"], **fields).json
    assert [c["text"] for c in whole["choices"]] == ["ab", "ab", "cd", "cd"]
    assert {c["finish_reason"] for c in whole["choices"]} == {"length"}
    assert whole["usage"]["prompt_tokens"] == whole["usage"]["total_tokens"] == 4
    options = {"include_usage": True}
    *chunks, totals, done = complete(
        server, "ab", **fields, stream=True, stream_options=options
    ).events
    assert [c["choices"][0]["text"] for c in chunks] == ["ab", "", "ab", ""]
    assert totals["usage"] == {**whole["usage"], "prompt_tokens": 2, "total_tokens": 2}
    assert done == "[DONE]"
    assert len(server.journal("add")) == num_asked
    assert complete(server, "a", max_tokens=0).status == 400


def test_what_a_prompt_alone_holds_is_still_checked(server: RunningServer) -> None:
    for prompt in ("", [-1], [9999], "x" * 3000):
        assert complete(server, prompt, echo=True, max_tokens=0).status == 400


def test_log_probabilities_of_prompts_are_refused_by_name(server: RunningServer) -> None:
    for fields, param in (
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "logprobs": 0, "max_tokens": 0}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
    ):
        answer = complete(server, "a", **fields)
        assert answer.status == 400
        assert answer.json["error"]["param"] == param
    assert complete(server, script("a"), n=2, best_of=2).status == 200


def test_special_tokens_are_shown_where_that_is_asked(server: RunningServer) -> None:
    fields = {"ignore_eos": True, "max_tokens": 4}
    for shows, text in ((False, "ab"), (True, "ab<|end|><|end|>")):
        answer = complete(server, script("ab"), **fields, skip_special_tokens=not shows).json
        assert answer["choices"][0]["text"] == text
    ended = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert complete(server, script("a"), **ended).json["choices"][0]["text"] == "a<|end|>"
    ended["include_stop_str_in_output"] = False
    assert complete(server, script("a"), **ended).json["choices"][0]["text"] == "a"


def test_token_ids_are_returned(server: RunningServer) -> None:
    encode = tokenizer_of(server.folder).encode
    eos = tokenizer_of(server.folder).eos_token_ids[0]
    whole = chat(server, script("ab"), return_token_ids=True).json
    assert text_of(server, whole["prompt_token_ids"]) == f"user:{script('ab')}\nassistant:"
    assert whole["choices"][0]["token_ids"] == [*encode("ab"), eos]
    first, *chunks, _ = chat(server, script("ab"), return_token_ids=True, stream=True).events
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks)
    ids = [x for chunk in chunks for x in chunk["choices"][0].get("token_ids", ())]
    assert ids == whole["choices"][0]["token_ids"]

    prompts = [script("ab"), script("c")]
    for choice in complete(server, prompts, return_token_ids=True).json["choices"]:
        assert choice["prompt_token_ids"] == encode(prompts[choice["index"]])
    first, *_ = complete(server, script("ab"), return_token_ids=True, stream=True).events
    assert first["choices"][0]["prompt_token_ids"] == encode(script("ab"))


def test_tokens_of_logprobs_may_be_ids(server: RunningServer) -> None:
    fields = {"return_tokens_as_token_ids": True}
    (a,) = tokenizer_of(server.folder).encode("a")
    whole = chat(server, script("a"), logprobs=True, top_logprobs=1, **fields).json
    entry = whole["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{a}"
    assert entry["bytes"] == [ord("a")]
    older = complete(server, script("ab"), logprobs=1, **fields).json["choices"][0]["logprobs"]
    assert older["tokens"][0] == f"token_id:{a}"
    assert older["text_offset"] == [0, 1, 2]


def test_a_prompt_is_cut_to_length(server: RunningServer) -> None:
    def kept(**fields: Any) -> str:
        answer = complete(server, "0123456789", echo=True, max_tokens=0, **fields).json
        return str(answer["choices"][0]["text"])

    assert kept(truncate_prompt_tokens=3) == "789"
    assert kept(truncate_prompt_tokens=3, truncation_side="right") == "012"
    assert kept(truncate_prompt_tokens=99) == kept(truncate_prompt_tokens=-1) == "0123456789"
    assert complete(server, "a", truncate_prompt_tokens=0).status == 400
    long = "x" * 5000 + script("a")
    fitting = complete(server, long, truncate_prompt_tokens=-1, max_tokens=10)
    assert fitting.json["usage"]["prompt_tokens"] == 2048 - 10
    assert chat(server, long, truncate_prompt_tokens=-1).status == 200


def test_how_a_chat_becomes_a_prompt(server: RunningServer) -> None:
    def prompt(messages: list[dict[str, str]], **fields: Any) -> str:
        body = {"model": "toy", "messages": messages, "return_token_ids": True, **fields}
        answer = server.post(CHAT, body).json
        return text_of(server, answer["prompt_token_ids"])

    user = {"role": "user", "content": script("ab")}
    assert prompt([user]).endswith("\nassistant:")
    assert prompt([user], add_generation_prompt=False) == f"user:{script('ab')}\n"
    begun = [user, {"role": "assistant", "content": script("be")}]
    assert prompt(begun, continue_final_message=True).endswith(f"assistant:{script('be')}")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    answer = chat(server, "a", **both)
    assert answer.json["error"]["param"] == "continue_final_message"
    unused = chat(server, "a", documents=[{"title": "t", "text": "x"}])
    assert unused.json["error"]["param"] == "documents"
    assert chat(server, script("a"), documents=[]).status == 200


def test_the_clients_id_is_shown_and_names_nothing(server: RunningServer) -> None:
    """Two requests of one id run at once; neither is in the other's way."""
    fields = {"request_id": "mine-1", "n": 2, "stream": True}
    with_id = [
        server.client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": script("abc", delay_s=0.02)}],
            stream=True,
            n=2,
            extra_body={"request_id": "mine-1"},
        )
        for _ in range(2)
    ]
    for answer in with_id:
        chunks = list(answer)
        assert {chunk.id for chunk in chunks} == {"chatcmpl-mine-1"}
        text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
        assert sorted(text) == sorted("abcabc")
    assert not any("mine" in note["id"] for note in server.journal("add"))
    assert complete(server, script("a"), **{**fields, "stream": False}).json["id"] == "cmpl-mine-1"


def test_the_fingerprint_is_that_of_the_engine(server: RunningServer) -> None:
    whole = chat(server, script("a")).json["system_fingerprint"]
    assert whole.startswith("fp_")
    *chunks, _ = complete(server, script("a"), stream=True).events
    assert {chunk["system_fingerprint"] for chunk in chunks} == {whole}


def test_one_chunk_a_token(server: RunningServer) -> None:
    fields = {"stream": True, "stream_interval": "token"}
    first, *body, last, _ = chat(server, script("né!", burst=50), **fields).events
    deltas = [chunk["choices"][0]["delta"] for chunk in (first, *body, last)]
    assert [d.get("content") for d in deltas] == ["", "n", "", "é", "!", "", None]


def test_a_model_is_found_by_its_name(server: RunningServer) -> None:
    found = server.client.models.retrieve("toy")
    assert found == server.client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="'other/model'"):
        server.client.models.retrieve("other/model")


def test_parts_of_characters_are_told_by_their_bytes(server: RunningServer) -> None:
    """Three tokens of one byte each are one character; what reads alike must not be one key."""
    fields = {"logprobs": True, "top_logprobs": 2, "token_info": True}
    choice = chat(server, script("a€b"), **fields).json["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries[:5]] == [[byte] for byte in "a€b".encode()]
    assert bytes(byte for entry in choice["token_info"][:5] for byte in entry["bytes"]) == (
        "a€b".encode()
    )
    answer = complete(server, script("a€b"), logprobs=2, max_tokens=5)
    told = answer.json["choices"][0]["logprobs"]
    assert told["tokens"][1] == "bytes:\\xe2"
    assert told["text_offset"] == [0, 1, 1, 1, 2]


def test_where_tokens_came_from(server: RunningServer) -> None:
    fields = {"token_info": True}
    whole = complete(server, script("ab", burst=2), **fields).json["choices"][0]
    (a,) = tokenizer_of(server.folder).encode("a")
    assert whole["token_info"][0] == {
        "id": a,
        "text": "a",
        "bytes": [97],
        "sources": ["script"],
        "kind": "accepted",
        "depth": 1,
        "step": 0,
    }
    assert [i["text"] for i in whole["token_info"]] == ["a", "b", "<|end|>"]
    assert whole["token_info"][1]["kind"] == "bonus"
    assert "rejected_drafts" not in whole
    *chunks, _, _ = chat(server, script("ab", burst=2), **fields, stream=True).events
    told = [i for chunk in chunks for i in chunk["choices"][0].get("token_info", ())]
    assert told == whole["token_info"]
    assert "token_info" not in chat(server, script("a"), token_info=False).json["choices"][0]


def test_settings_of_the_server(own_server: Callable[..., RunningServer]) -> None:
    strict = own_server(strict_params=True, force_usage=True)
    strict.wait_ready()
    refused = chat(strict, script("a"), temprature=1)
    assert refused.status == 400
    assert refused.json["error"]["param"] == "temprature"
    *_, totals, done = chat(strict, script("a"), stream=True).events
    assert totals["choices"] == []
    assert totals["usage"]["completion_tokens"] == 2
    assert done == "[DONE]"
