"""Served: a server process of our own for a measurement, and clients that note when chunks come."""

from __future__ import annotations

import ctypes
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from specdec.config import EngineConfig
from specdec.errors import EngineStopped, SpecdecError

SERVE = "from specdec.cli import main; main()"
SLOW_CHOICES, SLOW_TOKENS, SLOW_LOGPROBS = 8, 192, 20  # some 4 MB, more than sockets take in
WAIT_S = 120.0
_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before a process is forked
TOKEN_MARK = b'"delta":{"content":"'  # the chunk that opens an answer has the role there first
LONGEST_TAIL = len(TOKEN_MARK) - 1  # so much of a mark may come without its end


@dataclass
class Stream:
    """A chat stream; `begun` is when its request was sent."""

    connection: socket.socket
    begun: float

    def arrivals(self) -> Iterator[float]:
        """When each token came, one at a time; SpecdecError if the answer is not such a stream.

        The bytes are only searched: on a small machine the client's work slows the server down.
        """
        tail = b""
        while data := self.connection.recv(2**16):
            now = time.perf_counter()
            text = tail + data
            for _ in range(text.count(TOKEN_MARK)):
                yield now
            if b'{"error":' in text:
                raise SpecdecError(f"the server refused: {text[-400:].decode(errors='replace')}")
            tail = text[-LONGEST_TAIL:]


class Served:
    """A running server.

    Example: `with Served.start(EngineConfig()) as server: ...`
    """

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process = process
        self.url = url
        self._address = urlsplit(url).netloc

    @classmethod
    @contextmanager
    def start(cls, config: EngineConfig) -> Iterator[Served]:
        """Start `specdec serve` on a free port; it ends with the block."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVE, "serve", "--port", "0", *_options(config)],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_end_with_parent,
        )
        try:
            yield cls(process, _url(process))
        finally:
            process.terminate()
            process.communicate()

    @contextmanager
    def stream(self, prompt: str, max_tokens: int, **more: object) -> Iterator[Stream]:
        """Ask for a stream; leaving the block leaves the stream."""
        host, _, port = self._address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT_S) as connection:
            begun = time.perf_counter()
            connection.sendall(_request(_body(prompt, max_tokens, stream=True, **more)))
            yield Stream(connection, begun)

    @contextmanager
    def slow_reader(self) -> Iterator[None]:
        """A client that asks for megabytes and reads none of them; the engine is done with it."""
        asked = {"n": SLOW_CHOICES, "logprobs": True, "top_logprobs": SLOW_LOGPROBS}
        with self.stream("Count.", SLOW_TOKENS, **asked) as stream:
            stream.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            self._wait_idle()
            yield

    def _wait_idle(self) -> None:
        """Until the engine has nothing to do."""
        deadline = time.monotonic() + WAIT_S
        while True:
            time.sleep(0.1)
            connection = http.client.HTTPConnection(self._address, timeout=WAIT_S)
            connection.request("GET", "/debug/load")
            load = json.loads(connection.getresponse().read())
            connection.close()
            if not load["running"] and not load["queued"]:
                return
            if time.monotonic() > deadline:
                raise SpecdecError("a measured server did not come to rest")

    @contextmanager
    def open_connections(self, num_connections: int) -> Iterator[None]:
        """Connections that have had an answer each and stay open."""
        with ExitStack() as stack:
            for _ in range(num_connections):
                connection = http.client.HTTPConnection(self._address, timeout=WAIT_S)
                stack.callback(connection.close)
                connection.request("GET", "/version")
                connection.getresponse().read()
            yield


def _end_with_parent() -> None:
    """A measurement that is killed leaves no server to falsify the next one (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGTERM)


def _body(prompt: str, max_tokens: int, **more: object) -> bytes:
    body = {
        "model": "measured",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        **more,
    }
    return json.dumps(body).encode()


def _request(body: bytes) -> bytes:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: measured\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _options(config: EngineConfig) -> Iterator[str]:
    """The options of `specdec serve` that make this configuration's engine."""
    yield from ("--served-model-name", "measured")
    for name in ("model", "weights", "kv", "backend", "drafter", "control"):
        yield from (f"--{name}", str(getattr(config, name)))
    for name in ("node_budget", "max_running", "kv_memory_mib", "threads"):
        if (value := getattr(config, name)) is not None:
            yield from (f"--{name.replace('_', '-')}", str(value))


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        if found := re.match(r"ready: (http://\S+)", line):
            return found.group(1)
        lines.append(line.strip())
    raise EngineStopped(f"the server did not start: {' '.join(lines)[-300:]}")
