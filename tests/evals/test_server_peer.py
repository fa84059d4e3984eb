"""ServerPeer: a server asked by token ids or messages, and what it does not take"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from specdec.errors import SpecdecError, UsageError
from specdec.evals.latency import peers
from specdec.evals.latency.contender import Question
from specdec.evals.latency.peer_setup import PeerSetup
from specdec.evals.latency.server_peer import ServerPeer

# --- servers ---


class Served(BaseHTTPRequestHandler):
    """A server that streams `max_tokens` tokens, two to a chunk, and refuses what `server` says."""

    server: Any

    def log_message(self, *_: Any) -> None:
        """Quietly."""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "served"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        refused = self.server.refused & (body.keys() | {self.path})
        if refused:
            self._send(400, f"what is {min(refused)}?")
            return
        self.server.bodies.append((self.path, body))
        if self.server.is_broken:
            self._send(500, "out of order")
            return
        chunks, total = [], body["max_tokens"]
        for done in range(0, total, 2):
            ids = list(range(done, min(total, done + 2)))
            choice: dict[str, Any] = {"text": "ab", "index": 0}
            if body.get("return_token_ids"):
                choice["token_ids"] = ids
            usage = {"prompt_tokens": 3, "completion_tokens": done + len(ids)}
            usage["prompt_tokens_details"] = {"cached_tokens": 2}  # type: ignore[assignment]  # JSON
            chunks.append(json.dumps({"choices": [choice], "usage": usage}))
        self._send(200, "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


@dataclass
class Host:
    """A running one."""

    server: Any
    url: str


Start = Callable[..., Host]


@pytest.fixture
def host() -> Iterator[Start]:
    running: list[ThreadingHTTPServer] = []

    def start(*refused: str) -> Host:
        server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Served)
        server.refused, server.bodies, server.is_broken = set(refused), [], False
        running.append(server)
        Thread(target=server.serve_forever, args=(0.01,)).start()
        return Host(server, f"http://127.0.0.1:{server.server_port}")

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_a_server_is_asked_by_token_ids_and_says_when_tokens_come(host: Start) -> None:
    served = host()
    peer = ServerPeer(served.url)
    found = peer(Question((4, 5, 6), 5, temperature=0.5, seed=9))
    assert found.token_ids == (0, 1, 2, 3, 4) and found.num_prefix_hit == 2
    assert [arrival.num_tokens for arrival in found.arrivals] == [2, 2, 1]
    peer(Question((4, 5, 6), 5))
    (path, body), (_, again) = served.server.bodies[-2:]
    assert path == "/v1/completions" and body["prompt"] == [4, 5, 6]
    asked = {name: body[name] for name in ("model", "temperature", "seed", "max_tokens")}
    assert asked == {"model": "served", "temperature": 0.5, "seed": 9, "max_tokens": 5}
    assert body["ignore_eos"] and body["cache_salt"] != again["cache_salt"]


def test_a_server_may_have_a_label(host: Start) -> None:
    served = host()
    name = f"vllm ngram={served.url}/v1#chat"
    servers = peers.check_peers([name], PeerSetup("m", 9))
    [(text, contenders)] = peers.make_peers([name], PeerSetup("m", 9), servers)
    assert text == name and list(contenders) == ["vllm ngram"] and servers[name].is_chat
    messages = ({"role": "user", "content": "Why?"},)
    assert contenders["vllm ngram"](Question((4,), 3, messages=messages)).num_tokens == 3
    served.server.is_broken = True
    with pytest.raises(SpecdecError, match=r"^vllm ngram did not answer: 500 out of order"):
        servers[name](Question((4,), 3, messages=messages))


def test_fields_that_a_server_refuses_are_left_out(host: Start) -> None:
    served = host("cache_salt", "return_token_ids")
    found = ServerPeer(served.url)(Question((4, 5, 6), 5))
    assert found.token_ids is None and found.num_tokens == 5
    body = served.server.bodies[-1][1]
    assert body["ignore_eos"] and not body.keys() & {"cache_salt", "return_token_ids"}


def test_a_server_may_be_asked_by_messages(host: Start) -> None:
    served = host("/v1/completions")
    hint = rf"^other does not answer: 400 what is /v1/completions\?; .*: {served.url}#chat$"
    with pytest.raises(UsageError, match=hint):
        ServerPeer(f"other={served.url}")
    messages = ({"role": "user", "content": "Why?"},)
    peer = ServerPeer(f"{served.url}/v1#chat")
    assert peer.is_chat and peer(Question((4,), 3, messages=messages)).num_tokens == 3
    path, body = served.server.bodies[-1]
    assert path == "/v1/chat/completions" and body["messages"] == list(messages)
    assert "prompt" not in body


def test_a_server_that_fails_later_is_no_answer(host: Start) -> None:
    served = host()
    peer = ServerPeer(served.url)
    served.server.is_broken = True
    with pytest.raises(SpecdecError, match="did not answer: 500 out of order"):
        peer(Question((4,), 3))
    with pytest.raises(UsageError, match="no server answers at"):
        peers.check_peers(["http://127.0.0.1:1"], PeerSetup("m", 9))
