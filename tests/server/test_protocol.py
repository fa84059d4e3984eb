"""Request bodies: what is taken, what is refused by name, and how sampling parameters come out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.errors import ContextLengthExceeded, InvalidRequest
from specdec.limits import SpeculationLimits
from specdec.params import SamplingParams
from specdec.server.parsing import parse_body
from specdec.server.protocol import ChatBody, CompletionBody
from specdec.server.sampling_fields import choice_params, least_room, sampling_params
from specdec.server.unsupported import UNSUPPORTED


class ByteEncoder:
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def chat(**fields: Any) -> ChatBody:
    messages = fields.pop("messages", [{"role": "user", "content": "hi"}])
    return parse_body(json.dumps({"model": "m", "messages": messages, **fields}).encode(), ChatBody)


def completion(**fields: Any) -> CompletionBody:
    body = {"model": "m", "prompt": "hi", **fields}
    return parse_body(json.dumps(body).encode(), CompletionBody)


def params(body: ChatBody | CompletionBody, num_prompt: int = 10, room: int = 90) -> SamplingParams:
    return sampling_params(
        body, encoder=ByteEncoder(), num_prompt=num_prompt, max_model_len=num_prompt + room
    )


def refused(call: Any) -> str | None:
    """The field that a refusal names."""
    with pytest.raises(InvalidRequest) as caught:
        call()
    assert len(str(caught.value)) < 1024
    return caught.value.param


def test_defaults_are_those_of_openai_and_not_of_the_engine() -> None:
    assert params(chat()) == SamplingParams(max_tokens=90, temperature=1.0)
    assert params(completion()) == SamplingParams(max_tokens=16, temperature=1.0)


def test_null_means_not_given_for_every_optional_field() -> None:
    optional = set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__)
    nulls = dict.fromkeys(sorted((optional | set(UNSUPPORTED)) - {"model", "messages", "prompt"}))
    assert params(chat(**nulls)) == params(chat())
    assert params(completion(**nulls)) == params(completion())


def test_every_sampling_field_arrives() -> None:
    shared: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "seed": 7,
    }
    given = params(
        chat(
            **shared,
            max_tokens=5,
            max_completion_tokens=6,
            stop=["a", "b"],
            stop_token_ids=[3],
            logit_bias={"4": -100},
            bad_words=["no"],
            allowed_token_ids=[1, 2],
            logprobs=True,
            top_logprobs=3,
        )
    )
    assert given == SamplingParams(
        **shared,
        max_tokens=6,
        stop=("a", "b"),
        stop_token_ids=frozenset({3}),
        logit_bias={4: -100.0},
        bad_words=((110, 111), (32, 110, 111)),
        allowed_token_ids=frozenset({1, 2}),
        logprobs=3,
    )


def test_two_spellings_that_clients_use() -> None:
    assert params(chat(top_k=-1)).top_k == 0
    assert params(chat(stop="x")).stop == ("x",)
    assert params(chat(seed=-1)).seed == 2**64 - 1, "a signed seed keeps its bits"
    assert params(chat(seed=-(2**63))).seed == 2**63
    assert params(chat(temperature=0)).is_greedy


def test_a_prompt_leaves_room_for_what_is_asked_or_what_the_endpoint_means() -> None:
    assert (least_room(chat()), least_room(completion())) == (1, 16)
    assert (least_room(chat(max_tokens=5)), least_room(completion(max_tokens=5))) == (5, 5)


def test_logprobs_differ_between_the_endpoints() -> None:
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(chat(logprobs=False)).logprobs is None
    assert params(completion(logprobs=0)).logprobs == 0
    assert refused(lambda: params(chat(top_logprobs=2))) == "top_logprobs"
    assert refused(lambda: params(chat(logprobs=True, top_logprobs=99))) == "top_logprobs"
    assert refused(lambda: params(completion(logprobs=99))) == "logprobs"


def test_choice_seeds_follow_the_request_seed_and_wrap() -> None:
    last = SamplingParams(seed=2**64 - 1)
    assert [choice_params(last, i).seed for i in range(3)] == [2**64 - 1, 0, 1]
    assert choice_params(SamplingParams(), 1).seed is None


RUNNING = ["prediction", "suffix"]


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({}, SpeculationLimits()),
        ({"enabled": None, "drafters": None, "max_depth": None}, SpeculationLimits()),
        ({"enabled": False, "max_nodes": 5}, SpeculationLimits(max_nodes=0)),
        ({"enabled": True, "max_nodes": 5}, SpeculationLimits(max_nodes=5)),
        ({"enabled": True, "max_nodes": 0}, SpeculationLimits(max_nodes=0)),
        ({"max_depth": 1}, SpeculationLimits(max_depth=1)),
        ({"drafters": ["suffix"]}, SpeculationLimits(drafters=("suffix",))),
        ({"drafters": ["suffix", "suffix"]}, SpeculationLimits(drafters=("suffix",))),
    ],
)
def test_speculation_limits(fields: dict[str, Any], limits: SpeculationLimits) -> None:
    speculation = chat(speculation=fields).speculation
    assert speculation is not None
    assert speculation.limits(RUNNING) == limits


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("enabled", 1),
        ("max_nodes", -1),
        ("max_nodes", 256),
        ("max_nodes", True),
        ("max_depth", 0),
        ("max_depth", 256),
        ("drafters", "suffix"),
        ("drafters", []),
        ("drafters", [""]),
        ("drafters", ["x" * 65]),
        ("drafters", ["suffix"] * 65),
        ("drafters", [5]),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_by_name(field: str, value: object) -> None:
    found = refused(lambda: chat(speculation={field: value})) or ""
    assert found.startswith(f"speculation.{field}"), "msgspec may add which item it is"


def test_an_unknown_limit_is_refused() -> None:
    assert refused(lambda: chat(speculation={"maxnodes": 3})) == "speculation"


@pytest.mark.parametrize("name", ["medusa", "suffix=3", "Suffix", "none"])
def test_a_drafter_that_does_not_run_is_refused_with_those_that_do(name: str) -> None:
    speculation = chat(speculation={"drafters": ["suffix", name]}).speculation
    assert speculation is not None
    with pytest.raises(InvalidRequest, match=f"{name!r} .* choose from prediction, suffix") as no:
        speculation.limits(RUNNING)
    assert no.value.param == "speculation.drafters"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("echo", True),
        ("suffix", "end"),
        ("audio", {"voice": "v"}),
        ("guided_json", {}),
        ("structured_outputs", {"json": {}}),
        ("store", True),
        ("service_tier", "flex"),
        ("kv_transfer_params", {"a": [1]}),
        ("n_predict", 5),
        ("tool_choice", "required"),
    ],
)
def test_a_known_field_that_is_not_supported_is_refused_by_name(field: str, value: object) -> None:
    assert refused(lambda: chat(**{field: value})) == field


def test_an_unsupported_field_that_asks_for_nothing_is_fine() -> None:
    for field, values in UNSUPPORTED.items():
        for value in values:
            chat(**{field: value})
            completion(**{field: value})
    assert refused(lambda: chat(id_slot=-1.0)) == "id_slot", "-1.0 is not -1"


@pytest.mark.parametrize("field", ["add_generation_prompt", "chat_template", "reasoning_effort"])
def test_a_chats_own_fields_are_refused_by_completions(field: str) -> None:
    assert refused(lambda: completion(**{field: "x"})) == field


def test_unknown_fields_are_ignored() -> None:
    assert params(chat(rank=[1], xyz="1")) == params(chat())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", True),
        ("top_p", 0),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", 10**30),
        ("max_completion_tokens", 0),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", [""]),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": "a"}),
        ("logit_bias", {"1": 100.5}),
        ("bad_words", ["x"] * 129),
        ("bad_words", ["x" * 1025]),
        ("stop", "x" * 1025),
        ("best_of", 2),
        ("request_id", "../a"),
        ("request_id", "a\nb"),
        ("request_id", "a\0"),
        ("request_id", ""),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
        ("stream_interval", "word"),
        ("stream_interval", 1),
        ("cache_salt", "x" * 1025),
        ("add_special_tokens", True),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"self": 1}),
        ("reasoning_effort", "heroic"),
        ("documents", 1),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("min_tokens", 1000),
        ("stream_options", 5),
        ("messages", []),
        ("messages", "hi"),
        ("model", None),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: object) -> None:
    def use() -> None:
        body = chat(**{field: value})
        body.template_messages()
        params(body)

    assert refused(use) == field


def test_a_missing_field_is_named() -> None:
    assert refused(lambda: parse_body(b'{"model": "m"}', ChatBody)) == "messages"
    assert refused(lambda: parse_body(b'{"messages": []}', ChatBody)) == "model"


def test_fields_that_ban_every_token_are_refused_where_that_is_known() -> None:
    def use(**fields: Any) -> SamplingParams:
        return sampling_params(
            chat(**fields),
            encoder=ByteEncoder(),
            num_prompt=1,
            max_model_len=99,
            eos_token_ids=(2,),
        )

    for fields in (
        {"allowed_token_ids": [97], "bad_words": ["a"]},
        {"allowed_token_ids": [2], "min_tokens": 1},
        {"allowed_token_ids": [2, 97, 5], "min_tokens": 1, "bad_words": ["a"]}
        | {"stop_token_ids": [5]},
    ):
        assert refused(lambda fields=fields: use(**fields)) == "allowed_token_ids"
    assert use(allowed_token_ids=[2]).allowed_token_ids == frozenset({2})
    assert use(allowed_token_ids=[97], bad_words=["aa"]).bad_words


def test_what_is_told_of_the_request_changes_nothing() -> None:
    habits = {
        "user": "u",
        "safety_identifier": "s",
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "spaces_between_special_tokens": True,
        "best_of": 1,
        "request_id": "r-1.a:b_C",
    }
    chats = {"parallel_tool_calls": True, "store": False, "service_tier": "auto"}
    assert params(chat(**habits, **chats)) == params(chat())
    assert params(completion(**habits)) == params(completion())


def test_prompt_forms() -> None:
    def prompts(prompt: object) -> list[list[int]]:
        return completion(prompt=prompt).prompts(ByteEncoder())

    assert prompts("ab") == [[97, 98]]
    assert prompts([5, 6]) == [[5, 6]]
    assert prompts(["a", "b"]) == [[97], [98]]
    assert prompts([[5], [6, 7]]) == [[5], [6, 7]]
    for bad in ([], [1, "a"], [1, [2]], [[1, "a"]], 5, ["a"] * 129):
        assert (refused(lambda prompt=bad: prompts(prompt)) or "").startswith("prompt")


def test_a_prompt_that_fills_the_context_leaves_no_room() -> None:
    with pytest.raises(ContextLengthExceeded):
        params(chat(), room=0)
    assert params(chat(), room=1).max_tokens == 1
    assert params(completion(), room=3).max_tokens == 3
