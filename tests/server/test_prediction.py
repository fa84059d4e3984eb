"""Predicted text over HTTP: its forms, what it counts, and that it goes with every other field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.errors import InvalidRequest
from specdec.server.choice import Choice
from specdec.server.generation import prepare
from specdec.server.messages import Ready
from specdec.server.parsing import parse_body
from specdec.server.protocol import ChatBody, CompletionBody
from specdec.server.usage import PredictionTokens, Usage
from tests.server.conftest import RunningServer
from tests.server.real_engine import engine_command, serving_weights
from tests.toy import toy_tokenizer

# The real engine with this drafter alone, whatever the default is.
ENGINE = engine_command(
    "Engine(config, drafter=PredictionDrafter())",
    "from specdec.drafters.prediction import PredictionDrafter",
)
FIELDS: dict[str, Any] = {
    "model": "toy",
    "messages": [{"role": "user", "content": "abcabcabcabc"}],
    "max_tokens": 60,
    "seed": 5,
    "extra_body": {"allowed_token_ids": list(range(94))},  # printable, so a token is a character
}


def content(text: object) -> dict[str, object]:
    return {"type": "content", "content": text}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving_weights(tmp_path_factory.mktemp("weights"), ENGINE) as running:
        yield running


def create(server: RunningServer, **fields: Any) -> Any:
    return server.client.chat.completions.create(**{**FIELDS, **fields})


def counts(answer: Any) -> tuple[int, int]:
    details = answer.usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_answer_is_the_same_and_comes_in_fewer_steps(
    server: RunningServer, temperature: float
) -> None:
    plain = create(server, temperature=temperature, logprobs=True)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens == 60
    assert plain.usage.completion_tokens_details is None
    edited = f"{text[:30]}#{text[33:]}"
    predicted = create(server, temperature=temperature, logprobs=True, prediction=content(edited))
    assert predicted.choices == plain.choices
    assert predicted.usage.completion_tokens == 60, "rejected tokens are not in it"
    accepted, rejected = counts(predicted)
    stats = predicted.metrics["speculative_decoding"]
    assert accepted == stats["num_accepted_draft_tokens"] > 30
    assert accepted + rejected == stats["num_draft_tokens"]
    assert stats["num_spec_steps"] < 30


def test_a_stream_counts_as_the_whole_answer_does(server: RunningServer) -> None:
    text = create(server).choices[0].message.content
    whole = create(server, prediction=content(text[10:]))
    chunks = list(
        create(
            server,
            prediction=content(
                [{"type": "text", "text": part} for part in (text[10:20], text[20:])]
            ),
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert chunks[-1].usage == whole.usage
    assert counts(whole) > (30, 0)


def test_it_goes_with_several_choices(server: RunningServer) -> None:
    """OpenAI refuses these together."""
    fields: dict[str, Any] = {"n": 2, "temperature": 0.9, "presence_penalty": 0.5}
    plain = create(server, **fields)
    texts = [choice.message.content for choice in plain.choices]
    assert texts[0] != texts[1]
    both = create(server, **fields, prediction=content(texts[1]))
    assert [choice.message.content for choice in both.choices] == texts
    singles = [
        create(server, **{**fields, "n": 1, "seed": 5 + i}, prediction=content(texts[1]))
        for i in range(2)
    ]
    assert counts(singles[1])[0] > 30
    assert counts(both) == tuple(map(sum, zip(*map(counts, singles), strict=True)))


COMBINATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "top_p": 0.9},
    "n": {"n": 3, "temperature": 1},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "stop": {"stop": True},
    "stop kept": {"stop": True, "extra_body": {"include_stop_str_in_output": True}},
    "penalties": {"presence_penalty": 1, "frequency_penalty": 0.5, "logit_bias": {"5": 3}},
    "limit": {"max_tokens": 7},
    "by token": {"extra_body": {"stream_interval": "token"}},
    "told": {"extra_body": {"token_info": {"rejected": True}, "return_token_ids": True}},
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_it_changes_no_answer(server: RunningServer, name: str, streamed: bool) -> None:
    """With every field, streamed and whole: the same tokens and log-probabilities, and counts."""
    fields = dict(COMBINATIONS[name])
    fields["extra_body"] = {**FIELDS["extra_body"], **fields.get("extra_body", {})}
    text = create(server, **{**fields, "stop": None, "n": 1}).choices[0].message.content
    if fields.pop("stop", False):
        fields["stop"] = [text[25:28]]
    told = {"token_info", "rejected_drafts", "prompt_token_ids"}
    plain = create(server, **fields)
    guess = content(f"{text[:12]}~{text[13:]}")
    if not streamed:
        predicted = create(server, **fields, prediction=guess)
        shown = [choice.model_dump(exclude=told) for choice in predicted.choices]
        assert shown == [choice.model_dump(exclude=told) for choice in plain.choices]
        usage, stats = predicted.usage, predicted.metrics["speculative_decoding"]
    else:
        *chunks, totals = create(
            server,
            **fields,
            prediction=guess,
            stream=True,
            stream_options={"include_usage": True},
        )
        for choice in plain.choices:
            mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
            assert "".join(c.delta.content or "" for c in mine) == choice.message.content
            assert mine[-1].finish_reason == choice.finish_reason
            if choice.logprobs is not None:
                entries = [e for c in mine if c.logprobs for e in c.logprobs.content]
                assert entries == choice.logprobs.content
        usage, stats = totals.usage, totals.metrics["speculative_decoding"]
    assert usage.completion_tokens == plain.usage.completion_tokens
    details = usage.completion_tokens_details
    drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
    assert details.accepted_prediction_tokens == stats["num_accepted_draft_tokens"] > 0
    assert drafted == stats["num_draft_tokens"]


@pytest.mark.parametrize("text", ["", []])
def test_an_empty_prediction_counts_zero(server: RunningServer, text: object) -> None:
    assert counts(create(server, prediction=content(text))) == (0, 0)


def test_a_prediction_longer_than_the_context_is_cut(server: RunningServer) -> None:
    text = create(server).choices[0].message.content
    accepted, _ = counts(create(server, prediction=content(text + "~" * 100_000)))
    assert accepted > 30


def test_completions_take_it_too(server: RunningServer) -> None:
    fields = {**FIELDS, "prompt": "abcabc", "temperature": 0}
    del fields["messages"]
    ask = server.client.completions.create
    plain = ask(**fields)
    fields["extra_body"] = {**fields["extra_body"], "prediction": content(plain.choices[0].text)}
    predicted = ask(**fields)
    assert predicted.choices == plain.choices
    assert counts(predicted)[0] > 30


def test_no_speculation_means_no_drafts_of_it_either(server: RunningServer) -> None:
    extra = {**FIELDS["extra_body"], "speculation": {"enabled": False}}
    assert counts(create(server, prediction=content("abc"), extra_body=extra)) == (0, 0)


BAD_FORMS = [
    ("text", "prediction"),
    ([], "prediction"),
    (True, "prediction"),
    ({}, "prediction.type"),
    ({"content": "x"}, "prediction.type"),
    ({"type": "content"}, "prediction.content"),
    ({"type": "text", "content": "x"}, "prediction.type"),
    ({"type": None, "content": "x"}, "prediction.type"),
    (content(None), "prediction.content"),
    (content(5), "prediction.content"),
    (content({"type": "text", "text": "x"}), "prediction.content"),
    (content(["x"]), "prediction.content[0]"),
    (content([{"text": "x"}]), "prediction.content[0].type"),
    (content([{"type": "text", "text": 5}]), "prediction.content[0].text"),
    (content([{"type": "text"}]), "prediction.content[0]"),
    (content([{"type": "text", "text": "x"}, {"type": "image_url"}]), "prediction.content[1]"),
]


def predicted_text(raw: bytes, kind: type[ChatBody] | type[CompletionBody]) -> str:
    """What is read of a body before its requests are submitted."""
    prediction = parse_body(raw, kind).prediction
    assert prediction is not None
    return prediction.text


@pytest.mark.parametrize(("form", "param"), BAD_FORMS)
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_a_wrong_form_is_refused_by_name(
    form: object, param: str, kind: type[ChatBody] | type[CompletionBody]
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "prompt": "a"}
    raw = json.dumps({**body, "prediction": form}).encode()
    with pytest.raises(InvalidRequest) as caught:
        predicted_text(raw, kind)
    assert caught.value.param == param
    assert len(str(caught.value)) < 200


def test_a_wrong_form_is_answered_with_status_400(server: RunningServer) -> None:
    body = {key: FIELDS[key] for key in ("model", "messages")}
    answer = server.post("/v1/chat/completions", {**body, "prediction": content([{"type": "x"}])})
    assert answer.status == 400
    assert answer.json["error"]["param"] == "prediction.content[0]"
    assert server.post("/v1/chat/completions", {**body, "prediction": None}).status == 200


def test_every_choice_carries_the_tokens_that_the_target_can_write() -> None:
    raw = {"model": "m", "prompt": "abc", "n": 2, "prediction": content("xabcwvu" * 30)}
    body = parse_body(json.dumps(raw).encode(), CompletionBody)
    ready = Ready("m", "", "none", max_model_len=9, vocab_size=22)
    prepared = prepare(body, reply_id="r", tokenizer=toy_tokenizer(), ready=ready)
    # x, w are beyond the vocabulary; the first nine tokens are "xabcwvuxa".
    assert [s.prediction_ids for s in prepared.submits] == [(0, 1, 2, 21, 20, 0)] * 2
    assert prepared.has_prediction


def test_a_drafter_that_does_not_follow_it_counts_zero() -> None:
    choice = Choice.__new__(Choice)
    choice.num_tokens, choice.num_prefix_hit = 7, 0
    choice.stats = {"drafted_by_source": {"ngram": 5}, "accepted_by_source": {"ngram": 3}}
    assert PredictionTokens.of([choice]) == PredictionTokens(0, 0)
    both = {"drafted_by_source": {"ngram": 5, "prediction": 9}}
    choice.stats = {**both, "accepted_by_source": {"prediction": 4}}
    usage = Usage.of(1, [choice, choice], 2, has_prediction=True)
    assert usage.completion_tokens_details == PredictionTokens(8, 10)
    assert (usage.completion_tokens, usage.total_tokens) == (14, 15)
