"""RecordingProxy: a second observer of a run, which keeps every byte and when it came."""

from __future__ import annotations

import http.client
import io
import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Recorded:
    """One connection: (when, bytes) that came from the server, and when requests went to it."""

    answers: list[tuple[float, bytes]] = field(default_factory=list)
    requests: list[tuple[float, bytes]] = field(default_factory=list)


class RecordingProxy:
    """Passes bytes on between clients and a server until it is closed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections: list[Recorded] = []
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """No more connections; those that are there end with their clients."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in list(self._threads):
            thread.join(timeout=20)
        for connection in self._sockets:
            connection.close()

    def streams(self) -> list[Stream]:
        """All event streams that went through, parsed by Python's own HTTP client."""
        found: list[Stream] = []
        for connection in self.connections:
            raw = b"".join(data for _, data in connection.answers)
            reader = _Unclosed(raw)
            while reader.tell() < len(raw):
                answer = http.client.HTTPResponse(_Bytes(reader))  # type: ignore[arg-type]  # has all that is read of a socket
                answer.begin()
                body = answer.read()
                if answer.status == 200 and b"data: [DONE]" in body:
                    found.append(Stream.of(body.decode()))
        return found

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += (client, server)
                recorded = Recorded()
                self.connections.append(recorded)
                for source, sink, log in (
                    (client, server, recorded.requests),
                    (server, client, recorded.answers),
                ):
                    thread = threading.Thread(target=_pass_on, args=(source, sink, log))
                    self._threads.append(thread)
                    thread.start()


class _Bytes:
    """What HTTPResponse takes for a socket."""

    def __init__(self, reader: _Unclosed) -> None:
        self._reader = reader

    def makefile(self, _: str) -> _Unclosed:
        return self._reader


class _Unclosed(io.BytesIO):
    """Stays open after an answer: the next one follows on the same connection."""

    def close(self) -> None:
        """Nothing: the reader is not this answer's alone."""


def _pass_on(source: socket.socket, sink: socket.socket, log: list[tuple[float, bytes]]) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            log.append((time.perf_counter(), data))
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class Stream:
    """What one stream said, counted in the plainest way."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    num_accepted: int

    @classmethod
    def of(cls, body: str) -> Stream:
        chunks: list[dict[str, Any]] = [
            json.loads(line.removeprefix("data: "))
            for line in body.splitlines()
            if line.startswith("data: {")
        ]
        text = "".join(
            choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
        )
        last = chunks[-1]
        return cls(
            text,
            last["usage"]["prompt_tokens"],
            last["usage"]["completion_tokens"],
            last["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"],
        )
