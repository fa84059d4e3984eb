"""Provenance over HTTP from the real engine: every drafted node is accounted for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.server.conftest import RunningServer
from tests.server.real_engine import SAMPLED, serving_weights

FIELDS: dict[str, Any] = {
    "model": "toy",
    "max_tokens": 60,
    "seed": 11,
    **SAMPLED,
    "token_info": {"rejected": True},
    "return_token_ids": True,
}
CHAT = {"messages": [{"role": "user", "content": "abcabcabcabcabcabc"}]}
COMPLETION = {"prompt": "abcabcabcabcabcabc"}
PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving_weights(tmp_path_factory.mktemp("weights")) as running:
        yield running


def ask(server: RunningServer, body: dict[str, Any], **fields: Any) -> Any:
    (path,) = (PATHS[name] for name in PATHS if name in body)
    answer = server.post(path, {**FIELDS, **body, **fields})
    assert answer.status == 200, answer.text
    return answer.events if fields.get("stream") else answer.json


@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("n", [1, 2])
def test_every_drafted_node_is_a_token_or_rejected(
    server: RunningServer, body: dict[str, Any], n: int
) -> None:
    answer = ask(server, body, n=n)
    stats = answer["metrics"]["speculative_decoding"]
    infos = [info for choice in answer["choices"] for info in choice["token_info"]]
    rejected = [node for choice in answer["choices"] for node in choice["rejected_drafts"]]
    accepted = [info for info in infos if info["kind"] == "accepted"]
    assert len(accepted) == stats["num_accepted_draft_tokens"] > 0
    assert len(rejected) == stats["num_draft_tokens"] - len(accepted) > 0
    assert len(infos) == answer["usage"]["completion_tokens"]
    histogram = stats["acceptance_histogram"]
    assert len(histogram) == stats["num_spec_tokens"] + 1
    assert sum(histogram) == stats["num_spec_steps"]
    assert sum(k * count for k, count in enumerate(histogram)) == len(accepted)
    for choice in answer["choices"]:
        own = choice["token_info"]
        assert [info["id"] for info in own] == choice["token_ids"]
        steps = [info["step"] for info in own]
        assert steps == sorted(steps)
        for info, after in pairwise(own):
            is_next = after["step"] == info["step"]
            assert after["depth"] == (info["depth"] + 1 if is_next else 1)
            assert is_next == (info["kind"] == "accepted"), "the target's own token ends a step"
        assert {node["step"] for node in choice["rejected_drafts"]} <= set(steps)


@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("interval", ["step", "token"])
def test_a_stream_tells_the_same(
    server: RunningServer, body: dict[str, Any], interval: str
) -> None:
    (whole,) = ask(server, body)["choices"]
    *chunks, _ = ask(server, body, stream=True, stream_interval=interval)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for name in ("token_info", "rejected_drafts", "token_ids"):
        assert [x for choice in choices for x in choice.get(name, ())] == whole[name]
    for choice in choices:
        steps = {info["step"] for info in choice.get("token_info", ())}
        assert {node["step"] for node in choice.get("rejected_drafts", ())} <= steps
        if interval == "token":
            assert len(choice.get("token_info", ())) <= 1


def test_telling_changes_nothing(server: RunningServer) -> None:
    silent = ask(server, CHAT, token_info=False)["choices"][0]
    assert silent["token_ids"] == ask(server, CHAT)["choices"][0]["token_ids"]
    assert not {"token_info", "rejected_drafts"} & set(silent)


def test_a_request_that_bans_every_token_fails_alone(server: RunningServer) -> None:
    """After two tokens nothing is left: the client's mistake, told as such."""
    fields = {
        "allowed_token_ids": [65],
        "bad_words": ["bbb"],  # the text of token 65, three times
        "ignore_eos": True,
        "logit_bias": None,
    }
    letter = ask(server, COMPLETION, allowed_token_ids=[65], max_tokens=1, ignore_eos=True)
    fields["bad_words"] = [3 * letter["choices"][0]["text"]]
    answer = server.post(PATHS["prompt"], {**FIELDS, **COMPLETION, **fields})
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert "bad_words" in answer.json["error"]["message"]
    streamed = server.post(PATHS["prompt"], {**FIELDS, **COMPLETION, **fields, "stream": True})
    assert streamed.events[-1]["error"]["type"] == "invalid_request_error"
    sent = [x for e in streamed.events[:-1] for c in e["choices"] for x in c.get("token_ids", ())]
    assert sent == [65, 65]
    fields["bad_words"] = [letter["choices"][0]["text"]]
    known = server.post(PATHS["prompt"], {**FIELDS, **COMPLETION, **fields})
    assert known.json["error"]["param"] == "allowed_token_ids"
    assert json.dumps(ask(server, COMPLETION)["choices"])
