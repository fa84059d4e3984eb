"""Relay: stands before two servers and has each path's first attempt refused by one."""

from __future__ import annotations

import http.client
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Attempt:
    """One attempt: when it was answered and with which status."""

    status: int
    answered_at: float  # seconds of time.monotonic


class Relay:
    """`/NAME/v1/...` becomes `/v1/...` of the loading server, then of the ready one.

    Example: a client with base URL f"{relay.url}/7/v1" leaves its attempts in `attempts["7"]`.
    """

    def __init__(self, url: str, attempts: dict[str, list[Attempt]]) -> None:
        self.url = url
        self.attempts = attempts

    @classmethod
    @contextmanager
    def between(cls, loading_url: str, ready_url: str) -> Iterator[Relay]:
        attempts: dict[str, list[Attempt]] = defaultdict(list)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                _, name, path = self.path.split("/", 2)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                target = urlsplit(ready_url if attempts[name] else loading_url)
                connection = http.client.HTTPConnection(target.netloc, timeout=20)
                connection.request(
                    "POST", f"/{path}", body, {"Content-Type": self.headers["Content-Type"]}
                )
                answer = connection.getresponse()
                content = answer.read()
                attempts[name].append(Attempt(answer.status, time.monotonic()))
                self.send_response(answer.status)
                for key in ("Content-Type", "Retry-After"):
                    if (value := answer.headers[key]) is not None:
                        self.send_header(key, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                connection.close()

            def log_message(self, *_: object) -> None:
                """Nothing: the tests look at `attempts`."""

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            yield cls(f"http://127.0.0.1:{server.server_address[1]}", attempts)
            server.shutdown()
