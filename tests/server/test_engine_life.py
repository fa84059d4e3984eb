"""Engine processes one after the other: back-off, what cannot start, garbage, and leaks."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from specdec.config import EngineConfig
from specdec.errors import EngineStopped
from specdec.params import SamplingParams
from specdec.server.engine_client import EngineClient
from specdec.server.framing import encode_frame
from specdec.server.messages import Alive, Output, Ready, Submit, Tokens
from specdec.server.supervisor import BackOff, Supervisor

READY = encode_frame(Ready("m", "", "none", 100, 50))
ACCEPTED = encode_frame(Tokens([Output("r")]))
# Says what it is told to say; then it ends now, when it is sent something, or never. It
# imports next to nothing, so that a hundred of them start in seconds.
CHILD = """
import os, socket, sys, time
sock = socket.socket(fileno=int(sys.argv[-1]))
sock.recv(65536)
sock.sendall(bytes.fromhex(sys.argv[1]))
if sys.argv[2] == "never":
    time.sleep(3600)
if sys.argv[2] == "when told":
    sock.recv(65536)
os._exit(7)
"""
AT_ONCE = BackOff(first_s=0.0)


def child(says: bytes, ends: str = "when told") -> tuple[str, ...]:
    return (sys.executable, "-S", "-I", "-c", CHILD, says.hex(), ends)


async def until(check: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not check():
            await asyncio.sleep(0.005)


def children() -> set[str]:
    """Numbers of this process's children, zombies included."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Do the work; no child process outlives it."""
    before = children()

    async def main() -> None:
        await work()
        assert children() == before

    asyncio.run(main())


def test_the_delay_doubles_up_to_half_a_minute() -> None:
    delays = [BackOff().delay_s(num_ends) for num_ends in (1, 2, 3, 4, 7, 8, 9, 10_000)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 16.0, 30.0, 30.0, 30.0]


def test_a_hundred_restarts_leave_nothing_behind() -> None:
    """No file descriptor, no task, no zombie; every request ends, and every restart is told."""
    said: list[str] = []

    async def work() -> None:
        engine = Supervisor(child(READY + ACCEPTED), back_off=AT_ONCE, say=said.append)
        await engine.start(EngineConfig())
        await engine.wait_ready()
        before: dict[str, int] = {}
        for count in range(100):
            stream = engine.submit([Submit("r", (count,), SamplingParams())])
            outputs = [output async for output in stream]
            assert outputs[-1].error == "the engine process ended with exit code 7"
            await until(lambda wanted=count + 1: engine.num_restarts == wanted)  # type: ignore[misc]  # mypy sees no type in a lambda's default
            now = {
                "files": len(os.listdir("/proc/self/fd")),
                "tasks": len(asyncio.all_tasks()),
                "children": len(children()),
            }
            before = before or now
            assert now == before
        await engine.shutdown()
        assert len(asyncio.all_tasks()) == 1

    run(work)
    ended = "error: the engine process ended with exit code 7; starting it again"
    assert [re.sub(r"after [\d.]+", "after T", line) for line in said] == [
        ended,
        "ready again after T s",
    ] * 100


def test_an_engine_that_cannot_start_the_first_time_is_not_tried_again() -> None:
    async def work() -> None:
        engine = Supervisor(child(b"", "now"), back_off=AT_ONCE, say=said.append)
        await engine.start(EngineConfig())
        with pytest.raises(EngineStopped, match="the engine process ended with exit code 7"):
            await engine.wait_ready()
        with pytest.raises(EngineStopped):
            engine.check_ready()
        await engine.shutdown()

    said: list[str] = []
    run(work)
    assert said == []


def test_a_command_that_does_not_exist_is_one_line() -> None:
    async def work() -> None:
        engine = Supervisor(("/no/such/engine",))
        await engine.start(EngineConfig())
        with pytest.raises(EngineStopped, match="cannot be started: no such file or directory"):
            await engine.wait_ready()
        await engine.shutdown()

    run(work)


def test_a_minute_of_serving_ends_the_back_off() -> None:
    """Without it the third end waits; with no minute needed each end counts as the first."""

    async def third(calm_s: float) -> str:
        said: list[str] = []
        back_off = BackOff(first_s=0.01, calm_s=calm_s)
        engine = Supervisor(child(READY), back_off=back_off, say=said.append)
        await engine.start(EngineConfig())
        await engine.wait_ready()
        for count in range(3):
            engine.submit([Submit("r", (count,), SamplingParams())])
            await until(lambda wanted=count + 1: engine.num_restarts == wanted)  # type: ignore[misc]  # mypy sees no type in a lambda's default
        await engine.shutdown()
        return said[-2].rpartition(";")[2]

    assert asyncio.run(third(60.0)) == " starting it again in 0.02 s"
    assert asyncio.run(third(0.0)) == " starting it again"


@pytest.mark.parametrize("garbage", [b"\xff" * 100, b"\x00\x00\x00\x01\xc1"])
def test_garbage_ends_the_engine(garbage: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """Too long a frame or none of ours: the process is killed, whatever it may still be doing."""

    async def work() -> None:
        client = EngineClient(child(READY + garbage, "never"))
        await client.start(EngineConfig())
        await client.wait_ready()
        async with asyncio.timeout(3):
            await client.stopped.wait()
        assert str(client.failure).startswith("the engine process sent what cannot be read: ")

    run(work)
    assert "Traceback" in capsys.readouterr().err


def test_silence_is_counted_from_the_last_sign_of_life() -> None:
    """A server that is held up itself hears nothing meanwhile, which is not the engine's fault."""

    async def work() -> None:
        client = EngineClient(child(READY, "never"), hang_s=0.4)
        await client.start(EngineConfig())
        await client.wait_ready()
        for _ in range(4):
            client._receive(Alive())
            time.sleep(0.6)
            await asyncio.sleep(0.1)
        assert not client.stopped.is_set()
        await until(client.stopped.is_set)
        assert str(client.failure) == "the engine process hangs: no sign of life for 0.4 s"

    run(work)
