"""`specdec eval lossless --url`: our server against itself, and servers that know less."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals.data.sample import Sample
from specdec.evals.lossless.in_process import InProcess
from specdec.evals.lossless.question import Question
from specdec.evals.lossless.run import Run
from specdec.evals.lossless.served import ServedAnswers
from tests.evals.lossless_toy import samples
from tests.server.conftest import RunningServer
from tests.server.real_engine import serving_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "model"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with serving_weights(folder) as running:
        yield running


def test_a_server_is_compared_with_itself(server: RunningServer) -> None:
    run = Run(
        samples=samples("more"),
        drafters=("suffix", "prediction"),
        seeds=1,
        max_tokens=24,
        url=server.url,
    )
    data = run.equality().data
    assert data["is_lossless"] and data["compared_by"] == "tokens"
    assert [row["setting"] for row in data["rows"]] == [
        *("default", "default", "suffix", "suffix", "prediction", "prediction")
    ]
    assert all(row["answers"] == 6 for row in data["rows"])
    drafted = [row["tokens_per_step"] for row in data["rows"]]
    assert min(drafted[:2]) > 1  # random bytes are predicted badly as text
    assert data["served"] == {"url": server.url, "against": None, "model": "toy"}


def test_draws_of_a_server_are_tested(server: RunningServer) -> None:
    run = Run(samples=samples()[:1], drafters=(), draws=40, concurrency=8, url=server.url)
    data = run.distribution().data
    assert data["is_lossless"] and data["settings"][0]["setting"] == "default"
    assert data["tests"][0]["draws"] == 80


def test_a_server_weighs_tokens_as_the_engine_does(server: RunningServer, folder: Path) -> None:
    here = InProcess(EngineConfig(model=str(folder), kv_memory_mib=8))
    there = ServedAnswers(server.url)
    question = Question(0, samples()[0], 0, 1.0, 7, 8)
    expected, position = here.log_probs(question, (65, 66), (67, 250))
    found = there.log_probs(question, (65, 66), (67, 250))
    assert found is not None and found[1] == position
    assert dict(found[0]).keys() == dict(expected).keys() >= {67, 250}
    assert all(found[0][token] == pytest.approx(expected[token]) for token in expected)
    assert there.token_text(67) == here.token_text(67)
    assert there.draws_known_noise()


def test_what_a_server_cannot_do_is_refused(server: RunningServer) -> None:
    with pytest.raises(UsageError, match=r"the drafter 'medusa' does not run at .*prediction"):
        ServedAnswers(server.url, drafters=("suffix,medusa",))
    with pytest.raises(UsageError, match="no server answers"):
        ServedAnswers("http://127.0.0.1:9")
    message = {"role": "user", "content": "a" * 600}
    run = Run(samples=[Sample("long", "chat", (message,))], drafters=(), url=server.url)
    for measure in (run.equality, run.distribution):
        with pytest.raises(UsageError, match="sample long does not fit the context: leave it out"):
            measure()


def test_a_conversation_ends_where_the_servers_context_does(server: RunningServer) -> None:
    run = Run(
        samples=samples("a" * 600, "more"), drafters=(), seeds=1, max_tokens=8, url=server.url
    )
    report = run.equality()
    assert report.data["is_lossless"]
    assert [row["answers"] for row in report.data["rows"]] == [3, 3]
    assert report.data["num_skipped"] == 12  # two turns of three samples at two temperatures


@contextmanager
def other_server(
    answers: Sequence[dict[str, Any]],
    *,
    drafters: Sequence[str] = (),
    bodies: list[dict[str, Any]] | None = None,
) -> Iterator[str]:
    """A server that answers with these chunks and keeps the bodies.

    It knows no field of ours unless it has drafters.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path == "/v1/models" or drafters
            told = {"data": [{"id": "other"}], "drafters": list(drafters)}
            self._send(200 if is_known else 404, json.dumps(told).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if bodies is not None:
                bodies.append(body)
            choices = [{"index": 0, **answer} for answer in answers]
            events = [json.dumps({"choices": [choice]}) for choice in choices] + ["[DONE]"]
            self._send(200, "".join(f"data: {event}\n\n" for event in events).encode())

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chunk(text: str, *token_ids: int) -> dict[str, Any]:
    ids = {"token_ids": list(token_ids)} if token_ids else {}
    return {"delta": {"content": text}, "finish_reason": None, **ids}


END = {"delta": {}, "finish_reason": "stop"}


def test_two_servers_are_compared() -> None:
    plain, other = [chunk("ab", 1, 2), chunk("c", 3), END], [chunk("ab", 1, 2), chunk("d", 4), END]
    bodies: list[dict[str, Any]] = []
    with other_server(plain) as one, other_server(other, bodies=bodies) as two:
        same = Run(samples=samples(), drafters=(), url=one, against=one).equality()
        assert same.data["is_lossless"] and "does not tell whether it speculated" in same.text()
        found = Run(samples=samples(), drafters=(), url=two, against=one).equality()
    assert not found.data["is_lossless"] and found.data["compared_by"] == "tokens"
    first = found.data["divergences"][0]
    assert (first["position"], first["plain_token"], first["token"]) == (2, 3, 4)
    assert first["kind"] == "fault" and first["gap"] is None  # nothing there to weigh it by
    assert found.data["served"]["against"] == one
    assert not any({"prediction", "speculation"} & body.keys() for body in bodies)


def test_texts_are_compared_of_servers_without_token_ids() -> None:
    with other_server([chunk("abc"), END]) as one, other_server([chunk("abd"), END]) as two:
        found = Run(samples=samples()[:1], drafters=(), url=two, against=one).equality()
    assert found.data["compared_by"] == "characters" and "no token ids" in found.text()
    first = found.data["divergences"][0]
    assert (first["position"], first["plain_text"], first["text"]) == (2, "c", "d")


def test_a_server_without_the_field_needs_another() -> None:
    with other_server([END]) as url:
        with pytest.raises(UsageError, match=r"knows no request field `speculation`.*--against"):
            ServedAnswers(url)
        with pytest.raises(UsageError, match="knows no request field"):
            ServedAnswers(url, against=url, drafters=("ngram",))


def test_what_our_server_is_asked() -> None:
    bodies: list[dict[str, Any]] = []
    answer = [chunk("abcdefgh", 1, 2), END]
    asked = [*samples()[:1], Sample("t", "text", text="raw"), Sample("i", "ids", prompt_ids=(5, 6))]
    with other_server(answer, drafters=("suffix", "ngram"), bodies=bodies) as url:
        run = Run(samples=asked, drafters=("suffix,ngram",), temperatures=(0.0,), url=url)
        assert run.equality().data["is_lossless"]
    plain, default, suffix = bodies[:3], bodies[3:6], bodies[6:]
    assert all(body["speculation"] == {"enabled": False} for body in plain)
    assert not any("prediction" in body for body in plain)
    assert not any("speculation" in body for body in default)
    assert all(body["speculation"] == {"drafters": ["suffix", "ngram"]} for body in suffix)
    for body in (*default, *suffix):
        text = body["prediction"]["content"]
        assert len(text) == 8 and set(text) <= set("abcdefgh") and text != "abcdefgh"
    assert all(body["return_token_ids"] and body["temperature"] == 0 for body in bodies)
    assert [body.get("prompt") for body in plain] == [None, "raw", [5, 6]]
    assert plain[0]["messages"] == [{"role": "user", "content": "the cat"}]
