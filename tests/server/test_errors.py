"""Errors: each has a status that clients act on and a body that they can read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.server.script import say

if TYPE_CHECKING:
    from tests.server.conftest import RunningServer

CHAT = "/v1/chat/completions"


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert len(answer.text) < 1024
    error: dict[str, Any] = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b'{"user": "\xff"}', None),
        (b"[" * 100_000, None),
        ({"model": "toy"}, "messages"),
        ({"model": "toy", "messages": say("a"), "temperature": "hot"}, "temperature"),
        ({"model": "toy", "messages": say("a"), "tools": [{}]}, "tools"),
        ({"model": "toy", "messages": say("a"), "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"model": "toy", "messages": say("a"), "stop": ["x"] * 5}, "stop"),
        (
            {"model": "toy", "messages": say("a"), "speculation": {"drafters": ["medusa"]}},
            "speculation.drafters",
        ),
        ({"model": "toy", "messages": say("a"), "user": ["x" * 4000]}, "user"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_bad_body_is_400(
    server: RunningServer, body: Any, param: str | None, streamed: bool
) -> None:
    if isinstance(body, dict):
        body = {**body, "stream": streamed}
    error = error_of(server.post(CHAT, body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_prompt_token_ids_outside_the_vocabulary(server: RunningServer) -> None:
    for ids in ([-1], [100_000], [2**62]):
        body = {"model": "toy", "prompt": ids}
        assert error_of(server.post("/v1/completions", body), 400)["param"] == "prompt"
    assert error_of(server.post("/v1/completions", {"model": "toy", "prompt": ""}), 400)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_by_the_engine_is_400_even_for_a_stream(
    server: RunningServer, streamed: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(
            model="toy", messages=say("a", refuse="not today"), stream=streamed
        )
    assert caught.value.param == "prompt"
    assert "not today" in caught.value.message


@pytest.mark.parametrize("fields", [{"max_tokens": 4000}, {"messages": say("x" * 4000)}])
def test_what_does_not_fit_the_context(server: RunningServer, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(**{"model": "toy", "messages": say("a"), **fields})
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_404(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.chat.completions.create(model="../" * 5000, messages=say("a"))
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert len(caught.value.message) < 1024


def test_paths_and_methods(server: RunningServer) -> None:
    assert error_of(server.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(server.get(CHAT), 405)["code"] == "method_not_allowed"


def test_a_body_that_is_too_long_is_413(server: RunningServer) -> None:
    error = error_of(server.post(CHAT, b" " * (32 * 2**20 + 1)), 413)
    assert error["code"] == "request_too_large"


def test_one_request_that_fails_leaves_the_others_alone(server: RunningServer) -> None:
    create = server.client.chat.completions.create
    slow = create(model="toy", messages=say("neighbour", delay_s=0.02), stream=True)
    with pytest.raises(openai.InternalServerError) as caught:
        create(model="toy", messages=say("abc", die="request", die_after=1))
    assert caught.value.status_code == 500
    assert "logits are not finite" in caught.value.message
    with pytest.raises(openai.APIError, match="logits are not finite"):
        list(create(model="toy", messages=say("abc", die="request", die_after=1), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in slow) == "neighbour"


def test_an_error_in_a_stream_is_its_last_event(server: RunningServer) -> None:
    body = {"model": "toy", "messages": say("abc", die="request", die_after=2), "stream": True}
    *chunks, last = server.post(CHAT, body).events
    assert set(last) == {"error"}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * len(chunks)


def test_request_ids(server: RunningServer) -> None:
    own = server.request("GET", "/version", **{"X-Request-Id": "trace-1.a_B"})
    assert own.headers["x-request-id"] == "trace-1.a_B"
    for bad in ("a b", "x" * 129, "../etc"):
        made = server.request("GET", "/version", **{"X-Request-Id": bad}).headers["x-request-id"]
        assert made.startswith("req-")


def test_models_and_version(server: RunningServer) -> None:
    (model,) = server.client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("toy", "model", 2048)
    assert server.get("/version").json["version"]
    assert server.get("/health").status == 200


def test_the_number_of_answers_is_bounded(server: RunningServer) -> None:
    body = {"model": "toy", "prompt": ["a"] * 65, "n": 2}
    assert error_of(server.post("/v1/completions", body), 400)["param"] == "n"


def test_a_long_reason_is_cut(server: RunningServer) -> None:
    body = {"model": "toy", "messages": say("a", refuse="x" * 1500)}
    assert error_of(server.post(CHAT, body), 400)["message"].startswith("xxx")
