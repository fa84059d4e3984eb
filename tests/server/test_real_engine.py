"""The server in front of the real engine, with a random toy model that writes random bytes."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from specdec.decision import Reason
from specdec.server.explanation_view import as_text
from tests.server.conftest import RunningServer
from tests.server.real_engine import SAMPLED, serving_weights

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [{"role": "user", "content": "abcabcabcabcabcabc"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving_weights(tmp_path_factory.mktemp("weights")) as running:
        yield running


@pytest.mark.parametrize("fields", [{"temperature": 0}, SAMPLED], ids=["greedy", "sampled"])
def test_neither_streaming_nor_speculation_changes_the_answer(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    fields = {
        "model": "toy",
        "messages": PROMPT,
        "seed": 11,
        "max_tokens": 60,
        "logprobs": True,
        "extra_body": {"speculation": {"enabled": False}},
        **fields,
    }
    create = server.client.chat.completions.create
    plain = create(**fields)
    fields["extra_body"] = {"speculation": {"max_nodes": 8}}
    drafted = create(**fields)
    chunks = list(create(**fields, stream=True, stream_options={"include_usage": True}))
    text = plain.choices[0].message.content
    assert plain.metrics["speculative_decoding"]["num_draft_tokens"] == 0
    assert drafted.metrics["speculative_decoding"]["num_draft_tokens"] > 0
    assert drafted.choices[0].message.content == text
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert len(drafted.choices[0].logprobs.content) == plain.usage.completion_tokens


def test_a_requests_limits_hold(server: RunningServer) -> None:
    fields = {"model": "toy", "messages": PROMPT, "seed": 11, "max_tokens": 60, **SAMPLED}

    def ask(**limits: object) -> tuple[Any, Any]:
        answer = server.client.chat.completions.create(**fields, extra_body={"speculation": limits})
        return answer.choices[0].message.content, answer.metrics["speculative_decoding"]

    text, free = ask()
    assert set(free["drafted_by_source"]) == {"suffix"}
    assert len(free["acceptance_histogram"]) > 2, "some steps accept more than one node"
    flat_text, flat = ask(max_depth=1)
    none_text, none = ask(drafters=["prediction"])  # which has no prediction to follow
    assert len(flat["acceptance_histogram"]) == 2
    assert none["num_draft_tokens"] == 0
    assert {flat_text, none_text} == {text}


def test_an_adaptive_engine_explains_its_steps(tmp_path: Path) -> None:
    with serving_weights(tmp_path, control="adaptive") as server:
        create = server.client.chat.completions.create
        num_steps = [
            create(
                model="toy", messages=PROMPT, max_tokens=30, extra_body={"speculation": limits}
            ).metrics["speculative_decoding"]["num_spec_steps"]
            for limits in ({}, {"enabled": False})
        ]
        facts = server.get("/debug/speculation?last=200").json
    assert facts["control"] == "adaptive"
    assert sum(facts["reasons"].values()) == sum(num_steps)
    assert {decision["reason"] for decision in facts["decisions"][-num_steps[1] :]} == {
        "not allowed"
    }
    assert set(facts["reasons"]) <= {reason.value for reason in Reason}
    shown = as_text(facts, Console(width=80, force_terminal=False, file=StringIO()))
    assert "not allowed" in shown


def test_the_first_choice_is_the_answer_of_its_seed(server: RunningServer) -> None:
    def texts(seed: int, n: int) -> list[str]:
        answer = server.client.chat.completions.create(
            model="toy", messages=PROMPT, seed=seed, n=n, max_tokens=20
        )
        return [choice.message.content for choice in answer.choices]

    assert texts(5, 3) == texts(5, 1) + texts(6, 1) + texts(7, 1)


def test_a_stop_string_ends_engine_and_text_at_the_same_place(server: RunningServer) -> None:
    fields = {"model": "toy", "messages": PROMPT, "temperature": 0, "max_tokens": 40}
    create = server.client.chat.completions.create
    whole = create(**fields).choices[0].message.content
    stop = whole[7:9]
    answer = create(**fields, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].stop_reason == stop
    assert answer.usage.completion_tokens < 40
