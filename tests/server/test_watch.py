"""`specdec info --watch`: a running server's decisions as tables, as JSON, or one clear line."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO, StringIO, TextIOWrapper
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from specdec.errors import EngineStopped, SpecdecError, UsageError
from specdec.server.explanation_view import as_text
from specdec.server.watch import fetch, watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.conftest import RunningServer

# A shell that runs tests in the background has SIGINT ignored, for its children too.
COMMAND = """
import signal
from specdec.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""
DECISION = {
    "step": 1181,
    "reason": "not allowed",
    "num_requests": 3,
    "num_candidates": 22,
    "num_nodes": 9,
    "num_rows": 12,
    "predicted_gain": 1.5632,
    "observed_gain": 0.97,
    "decide_s": 0.0000214,
    "a_field_to_come": 5,
}
FACTS: dict[str, Any] = {
    "control": "adaptive",
    "speed_up": 1.42345,
    "reasons": {"speculate": 30, "off": 10},
    "decisions": [DECISION],
    "cost": {
        "forwards": [
            {"requests": 1, "context": 512, "rows_ms": {"1": 9.0, "2": 9.5, "8": 18.0}},
            {"requests": 2, "context": 512, "rows_ms": {"2": 10, "8": 20.25}},
        ],
        "rest_ms": 0.3,
        "ask_1_ms": {"suffix": 0.08},
    },
    "calibration": [{"drafter": "suffix", "score": "0.4-0.5", "claimed": 0.45, "evidence": 120}],
}
SHOWN = """\
control adaptive, speed up 1.423

decisions
                                                predicted observed decide
step reason      requests candidates nodes rows      gain     gain     us
─────────────────────────────────────────────────────────────────────────
1181 not allowed        3         22     9   12     1.56x    0.97x     21

reasons                             cost, ms by rows
          steps share               requests context 1 rows 2 rows 8 rows curve
────────────────────────────────    ───────────────────────────────────────────
speculate    30 ━━━━━━━━━━━━               1     512      9    9.5     18 ▅▅█
off          10 ━━━━                       2     512      -     10  20.25 ▄█
                                    rest ms 0.3, ask 1 ms: suffix 0.08

calibration
drafter score   claimed evidence
────────────────────────────────
suffix  0.4-0.5    0.45      120
"""


def rendered(facts: dict[str, Any]) -> str:
    return as_text(facts, Console(width=80, force_terminal=False, file=StringIO()))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", COMMAND, "info", "--watch", *arguments]


@contextlib.contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The URL of a server that has the same answer for everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_view_of_80_characters() -> None:
    assert rendered(FACTS) == SHOWN.rstrip("\n")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"decisions": []}, "candidates"),
        ({"decisions": [{}, "words", 5]}, "words"),
        ({"decisions": [{"observed_gain": "soon", "decide_s": None}]}, "soon"),
        ({"reasons": {"off": "often"}}, "often"),
        ({"reasons": {}}, "reasons"),
        ({"reasons": [77, 1]}, "77"),
        ({"cost": {"forwards": [{"rows_ms": {"1": "?"}}]}}, r'\[\{"rows_ms": \{"1": "\?"\}\}\]'),
        ({"cost": {"forwards": []}}, r"forwards +\[\]"),
        ({"cost": {"forwards": [{"rows_ms": {"1": 0, "2": 0}}]}}, "(?m)0 +0 ▁▁$"),
        ({"cost": [{"rows": 1, "ms": 0.25}]}, r"0\.25"),
        ({"reasons": {"off": 0}, "cost": {}}, r"off +0(?! ━)"),
        ({"new": {"a": {"deep": [1]}}}, r'\{"deep": \[1\]\}'),
        ({"new": [1, {"x": True}, None]}, "true"),
        ({"new": None}, "new -"),
        ({"cost": {**FACTS["cost"], "ask_1_ms": {}}}, "ask 1 ms: -"),
        ({"new": "[red]a\x1b[31mb"}, r"\[red\]a \[31mb"),
    ],
)
def test_whatever_is_explained_is_shown(fields: dict[str, Any], shown: str) -> None:
    text = rendered({**FACTS, **fields})
    assert re.search(shown, text)
    assert "\x1b" not in text


def test_a_long_cost_curve_is_thinned_out_with_both_ends() -> None:
    curve = {str(rows): rows for rows in range(1, 17)}
    text = rendered({"decisions": [], "cost": {"forwards": [{"requests": 1, "rows_ms": curve}]}})
    assert re.findall(r"(\d+) rows", text) == ["1", "4", "7", "10", "13", "16"]
    assert "▁▂▂▃▃▄▄▅▅▅▆▆▇▇██" in text


def test_where_only_ascii_can_be_written_it_is_ascii() -> None:
    with TextIOWrapper(BytesIO(), encoding="ascii") as out:
        text = as_text(FACTS, Console(width=80, force_terminal=False, file=out))
    assert text.isascii()
    assert "|447" in text and "-----" in text


def test_without_a_terminal_it_is_one_snapshot(server: RunningServer) -> None:
    server.post(
        "/v1/chat/completions", {"model": "toy", "messages": [{"role": "user", "content": "a"}]}
    )
    done = subprocess.run(
        command("--url", f"{server.url}/"), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("model toy, drafter prediction,suffix, control adaptive")
    assert re.search(
        r"^ *\d+ speculate +1 +7 +5 +6 +1\.50x +0\.50x +21$", done.stdout, re.MULTILINE
    )
    assert "\x1b" not in done.stdout


def test_json_is_a_document_to_a_line_until_interrupted(server: RunningServer) -> None:
    arguments = command("--json", "--interval", "0.1", "--url", server.url)
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        documents = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert [document["control"] for document in documents] == ["adaptive"] * 2
    assert process.returncode == 130
    assert said in ("", "specdec: interrupted\n"), "typer does not always leave it to us"


def test_on_a_terminal_it_is_renewed_until_interrupted(server: RunningServer) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "50"}
    arguments = command("--interval", "0.1", "--url", server.url)
    with subprocess.Popen(
        arguments, stdout=theirs, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        while shown.count(b"candidates") < 3:
            shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how Linux reports the end of a terminal
            while rest := os.read(ours, 65536):
                shown += rest
        _, said = process.communicate(timeout=30)
    os.close(ours)
    assert b"\x1b[?1049h" in shown and b"\x1b[?1049l" in shown, "the screen comes back"
    assert process.returncode == 130
    assert said in ("", "specdec: interrupted\n"), "typer does not always leave it to us"


def test_proxies_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with answering(200, json.dumps(FACTS).encode()) as url:
        assert fetch(url) == FACTS


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (200, b"<html>", UsageError, "is no specdec server; give another --url"),
        (200, b"\xff", UsageError, "is no specdec server"),
        (200, b"[" * 100_000, UsageError, "is no specdec server"),
        (200, b"{}", UsageError, "is no specdec server"),
        (200, b'{"decisions": 5}', UsageError, "is no specdec server"),
        (404, b"", UsageError, r"\(status 404\) does not explain speculation"),
        (500, b"oops", UsageError, r"\(status 500\) does not explain"),
        (500, b'{"error": {"message": "a\\u001b\\nb"}}', SpecdecError, "failed: a  b$"),
        (503, b'{"error": {"message": "loading"}}', EngineStopped, "cannot answer now: loading"),
        (503, b'{"error": []}', EngineStopped, "cannot answer now: Service Unavailable"),
    ],
)
def test_an_answer_that_is_none(
    status: int, body: bytes, kind: type[SpecdecError], words: str
) -> None:
    with answering(status, body) as url, pytest.raises(SpecdecError, match=words) as caught:
        fetch(url)
    assert type(caught.value) is kind
    assert url in str(caught.value)


@pytest.mark.parametrize("said", [None, b"", b"220 mail\r\n"])
def test_nobody_there_or_somebody_else(said: bytes | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(said or b"")

        thread = threading.Thread(target=answer, daemon=True)
        if said is None:
            listener.close()
        else:
            thread.start()
        with pytest.raises(EngineStopped, match=f"no server answers at {url}: .*--url"):
            fetch(url)
        if said is not None:
            thread.join()


BAD_URLS = """
nope
127.0.0.1:8000
file:///etc/passwd
http://
http://a:b
http://a:99999
http://a:0
http://[a
http://a b
http://ä
"""


@pytest.mark.parametrize("url", BAD_URLS.splitlines())
def test_a_url_that_cannot_be_one(url: str) -> None:
    with pytest.raises(UsageError, match="--url must be like http://127"):
        fetch(url)


@pytest.mark.parametrize("interval_s", [0, -1, 0.01, 1e9, float("nan"), float("inf")])
def test_an_interval_that_makes_no_sense(interval_s: float) -> None:
    with pytest.raises(UsageError, match=r"--interval must be between 0\.1 and 3600 seconds"):
        watch(interval_s=interval_s)


def test_a_server_that_goes_away_ends_the_watch(own_server: Callable[..., RunningServer]) -> None:
    server = own_server()
    server.wait_ready()
    arguments = command("--json", "--interval", "0.1", "--url", server.url)
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        server.end(signal.SIGKILL)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 4
    assert re.fullmatch(rf"specdec: no server answers at {server.url}: .*\n", said), said
