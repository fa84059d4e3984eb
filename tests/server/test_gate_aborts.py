"""A thousand clients that go away at any moment leave no block, task or socket behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import HERE, RunningServer, make_folder
from tests.server.real_engine import add_weights
from tests.server.script import chat
from tests.toy import compiled_native

if TYPE_CHECKING:
    from pathlib import Path

NUM_CLIENTS = 1000
AT_ONCE = 16


def request(rng: random.Random, **fields: object) -> bytes:
    """A request whose answer takes longer than its client stays."""
    directives: dict[str, Any] = rng.choice(
        [{"delay_s": 0.002, "end": False}, {"wait_s": 5}, {"queue_s": 5}, {"end": False}]
    )
    body = {**chat("on and on " * rng.randrange(1, 12), **directives), **fields}
    body |= {"stream": rng.random() < 0.5, "n": rng.choice([1, 1, 3])}
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def hang_up(url: Any, data: bytes, rng: random.Random) -> None:
    """Send all or part of a request, stay for a moment, perhaps read, and go."""
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    is_cut = rng.random() < 0.1
    writer.write(data[: rng.randrange(len(data))] if is_cut else data)
    moment = rng.choice([0.0, 0.02, 0.1, 0.3]) * 2 * rng.random()
    if rng.random() < 0.5:
        await asyncio.sleep(moment)
    else:
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(reader.read(200), moment + 0.001)
    if rng.random() < 0.5:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def hang_up_often(server: RunningServer, count: int, **fields: object) -> None:
    rng = random.Random(count)
    url = urlsplit(server.url)
    places = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with places:
            await hang_up(url, request(rng, **fields), rng)

    await asyncio.wait_for(asyncio.gather(*(one() for _ in range(count))), 120)


def check_nothing_is_left(server: RunningServer, **fields: object) -> None:
    def is_idle() -> bool:
        facts = server.get("/debug/load").json
        return bool(facts["queued"] == 0 == facts["running"])

    ask = {"model": "toy", "messages": [{"role": "user", "content": "[[{}]]still here"}]}
    list(server.client.chat.completions.create(**ask, stream=True, max_tokens=20))
    server.client.close()
    del server.client
    server.eventually(lambda: server.num_tasks < 12)
    asyncio.run(hang_up_often(server, 50, **fields))  # starts what serves many at once
    server.eventually(is_idle, timeout_s=20)
    num_tasks, num_sockets = server.num_tasks, server.num_sockets
    asyncio.run(hang_up_often(server, NUM_CLIENTS, **fields))
    server.eventually(is_idle, timeout_s=20)
    server.eventually(lambda: server.num_sockets <= num_sockets)
    server.eventually(lambda: server.num_tasks <= num_tasks)
    added = {note["id"] for note in server.journal("add")}
    assert len(added) > NUM_CLIENTS / 2, "most of them came as far as the engine"
    assert len(server.journal("abort")) > NUM_CLIENTS / 4
    answer = server.client.chat.completions.create(**ask, max_tokens=20)
    assert answer.choices[0].finish_reason in ("stop", "length")


@pytest.mark.timeout(200)
def test_with_a_scripted_engine(own_server: Callable[..., RunningServer]) -> None:
    server = own_server(max_queued_requests=0)
    server.wait_ready()
    check_nothing_is_left(server, max_tokens=1000)
    assert server.end() == ""
    assert server.process.returncode == 0


@pytest.mark.timeout(200)
def test_with_a_real_engine(tmp_path: Path) -> None:
    compiled_native()
    add_weights(make_folder(tmp_path))
    command = (sys.executable, str(HERE / "checked_engine.py"))
    server = RunningServer(tmp_path, engine_command=command, max_queued_requests=0)
    try:
        server.wait_ready()
        check_nothing_is_left(server, max_tokens=100)
        last = server.journal("step")[-1]
        assert (last["num_held"], last["num_requests"]) == (0, 0)
        assert server.get("/debug/load").json["kv_used"] == 0
        assert max(note["num_held"] for note in server.journal("step")) > 10, "they held blocks"
    finally:
        said = server.end()
    assert said == ""
    assert server.process.returncode == 0
