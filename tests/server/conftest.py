"""A server process with a scripted engine behind it, and clients to talk to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from tests.server.said import Said

HERE = Path(__file__).parent
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SERVE = """
import ast
import asyncio
import signal
import sys
from specdec.config import EngineConfig
from specdec.errors import SpecdecError
from specdec.server.serve import serve
from specdec.server.settings import ServerSettings
def count_tasks(*_):
    print("tasks:", len(asyncio.all_tasks()), file=sys.stderr, flush=True)
signal.signal(signal.SIGUSR1, count_tasks)
try:
    serve(
        EngineConfig(model=sys.argv[1], control=sys.argv[3]),
        ServerSettings(**ast.literal_eval(sys.argv[4])),
        port=int(sys.argv[2]),
        served_model_name="toy",
        engine_command=sys.argv[5:],
    )
except SpecdecError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
assert "torch" not in sys.modules, "the server process imported torch"
"""


def make_folder(folder: Path) -> Path:
    """A model's folder with a byte tokenizer, one token to a byte, and no weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({char: idx for idx, char in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def read_to_end(connection: socket.socket) -> str:
    """What a connection still brings, until the other side closes it or resets it."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received.decode(errors="replace")  # it may be cut anywhere


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, read to its end."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """Data of the server-sent events, decoded but for the last `[DONE]`."""
        assert self.text.endswith("\n\n"), self.text
        lines = [part.removeprefix("data: ") for part in self.text[:-2].split("\n\n")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class RunningServer:
    """A server process; `url` is known once it has said that it is ready.

    Its control is fixed unless a test asks: what adaptive control drafts depends on times.
    `settings` are those of ServerSettings.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        load_s: float = 0.0,
        control: str = "fixed",
        engine_command: Sequence[str] = (sys.executable, str(HERE / "scripted_engine.py")),
        **settings: object,
    ) -> None:
        self.folder = folder
        settings = {"grace_s": 5.0, "self_test": False, **settings}
        arguments = (str(folder), str(port), control, repr(settings), *engine_command)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SERVE, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONSAFEPATH": "1",
                "OMP_NUM_THREADS": "1",  # a toy model only suffers from more
                "SCRIPTED_LOAD_S": str(load_s),
            },
        )
        assert self.process.stderr is not None
        self.said = Said(self.process.stderr)
        self.url = ""

    def wait_ready(self) -> None:
        line = self.said.next(timeout_s=120)
        found = re.match(r"ready: (http://\S+) \(model toy, drafter \S+\)$", line)
        assert found, line
        self.url = found.group(1)

    def journal(self, what: str) -> list[dict[str, Any]]:
        """What the engine was told, of one kind."""
        lines = (self.folder / "journal.jsonl").read_text().splitlines()
        return [note for note in map(json.loads, lines) if note["what"] == what]

    @cached_property
    def client(self) -> Any:
        """The official client. Untyped: its types know neither our own fields of requests and
        answers (`stop_reason`, `metrics`) nor which optional parts our answers always have.
        """
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def connect(self) -> http.client.HTTPConnection:
        """A raw connection, for what a client library would hide."""
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=20)

    def request(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        """One request; the body is bytes or becomes JSON."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request(
                method, path, raw, {k.replace("_", "-"): headers[k] for k in headers}
            )
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read().decode())
        finally:
            connection.close()

    def post(self, path: str, body: object, **headers: str) -> Answer:
        return self.request("POST", path, body, **headers)

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, **headers)

    def open(self, data: bytes = b"", *, timeout_s: float = 20) -> socket.socket:
        """A connection on which these bytes have been sent."""
        url = urlsplit(self.url)
        connection = socket.create_connection((url.hostname, url.port), timeout=timeout_s)
        connection.sendall(data)
        return connection

    def exchange(self, data: bytes) -> str:
        """Send these bytes and read until the server closes the connection."""
        with self.open(data) as connection:
            return read_to_end(connection)

    @property
    def num_sockets(self) -> int:
        """TCP sockets that the server process holds, the one that listens included."""
        folder = Path(f"/proc/{self.process.pid}")
        table = (folder / "net/tcp").read_text().splitlines()[1:]
        names = {f"socket:[{line.split()[9]}]" for line in table}
        count = 0
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(link) in names
        return count

    @property
    def num_tasks(self) -> int:
        """Tasks of the server's event loop; only for a server that says nothing else meanwhile."""
        self.process.send_signal(signal.SIGUSR1)
        while not (line := self.said.next(timeout_s=10)).startswith("tasks: "):
            assert line.startswith("  "), line  # what it said when it was ready
        return int(line.removeprefix("tasks: "))

    @staticmethod
    def eventually(check: Callable[[], object], timeout_s: float = 5.0) -> None:
        """Wait until `check()` is true."""
        deadline = time.monotonic() + timeout_s
        while not check():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.01)

    def end(self, number: int = signal.SIGTERM) -> str:
        """Send a signal and wait; returns the rest of stderr, less what was said when ready."""
        if "client" in vars(self):
            self.client.close()
        self.said.resume()
        self.process.send_signal(number)
        self.process.wait(timeout=15)
        lines = self.said.rest(timeout_s=15).splitlines(keepends=True)
        while lines and lines[0].startswith(("ready: ", "  ")):
            del lines[0]
        return "".join(lines)


@contextlib.contextmanager
def serving(folder: Path, **options: Any) -> Iterator[RunningServer]:
    """A ready server that is ended in any case and must not have complained."""
    running = RunningServer(folder, **options)
    try:
        running.wait_ready()
        yield running
    finally:
        complaints = running.end()
    assert complaints == "", "the server complained while tests ran"
    assert running.process.returncode == 0


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for every test that leaves it running."""
    with serving(make_folder(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Servers of a test's own, for tests that break them."""
    started: list[RunningServer] = []

    def start(**options: Any) -> RunningServer:
        folder = make_folder(tmp_path / f"model-{len(started)}")
        started.append(RunningServer(folder, **options))
        return started[-1]

    yield start
    for running in started:
        running.end(signal.SIGKILL)
