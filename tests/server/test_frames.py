"""Damaged frames: whoever receives one ends with one line, and waits for nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config import EngineConfig
from specdec.errors import EngineStopped, SpecdecError
from specdec.params import SamplingParams
from specdec.server import engine_process
from specdec.server.engine_process import SteppedEngine
from specdec.server.framing import HEADER_LEN, encode_frame, frame_len
from specdec.server.messages import (
    Failed,
    Output,
    Ready,
    Start,
    Submit,
    Tokens,
    decode_to_engine,
    decode_to_server,
)
from specdec.server.template_worker import Render, Setup
from tests.server.scripted_engine import settled

START = encode_frame(Start(EngineConfig(model="m")))
SUBMIT = encode_frame(Submit("r", (1, 2), SamplingParams()))
READY = encode_frame(Ready("m", "/folder", "none", 100, 50))
TOKENS = encode_frame(Tokens([Output("r", [], "stop", stats={"a": 1})]))
DAMAGED = {
    "no msgpack": b"\0\0\0\x03\xc1\xc1\xc1",
    "another type": b"\0\0\0\x01\x01",
    "no body": b"\0\0\0\0",
    "a nest": (2000).to_bytes(4, "big") + b"\x91" * 1999 + b"\x90",
    "too long": b"\xff\xff\xff\xff" + bytes(100),
}
TRUNCATED = {"half a header": b"\0\0", "half a body": SUBMIT[:-3], "a header alone": SUBMIT[:4]}
FLIPS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=4)


def idle_engine(config: EngineConfig) -> SteppedEngine:
    """An engine that has nothing to do and refuses nothing."""
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=50))
    loaded = SimpleNamespace(name="m", max_model_len=100, model=model, eos_token_ids=())
    engine = SimpleNamespace(
        config=settled(config),
        reason="",
        loaded=loaded,
        controller=None,
        has_work=False,
        add=lambda request: None,
        abort=lambda request_id: None,
        step=list,
        close=lambda: None,
    )
    return cast(SteppedEngine, engine)


def run_engine(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Any]]:
    """The exit code of an engine process that is sent these bytes, and what it said."""
    monkeypatch.setattr(engine_process, "_ready", lambda *args: Ready("m", "", "none", 100, 50))
    ours, theirs = socket.socketpair()
    codes: list[int] = []
    with ours, theirs:
        ours.settimeout(10)
        ours.sendall(START)
        thread = threading.Thread(
            target=lambda: codes.append(engine_process.run(theirs, idle_engine)), daemon=True
        )
        thread.start()
        said = ours.recv(65536)  # that it is ready
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        thread.join(10)
        assert not thread.is_alive(), "it waits for what is not coming"
        theirs.close()
        while part := ours.recv(65536):
            said += part
    messages = []
    while said:
        end = HEADER_LEN + frame_len(said[:HEADER_LEN])
        messages.append(decode_to_server(said[HEADER_LEN:end]))
        said = said[end:]
    return codes[0], messages


@pytest.mark.parametrize("name", DAMAGED)
def test_the_engine_ends_at_a_damaged_frame_with_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, messages = run_engine(SUBMIT + DAMAGED[name], monkeypatch)
    assert code == EngineStopped.exit_code
    last = messages[-1]
    assert isinstance(last, Failed)
    assert last.message
    assert "\n" not in last.message
    assert len(last.message) <= 500


def test_a_damaged_first_frame_ends_the_engine_too() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(next(iter(DAMAGED.values())))
        assert engine_process.run(theirs, idle_engine) == EngineStopped.exit_code
        said = ours.recv(65536)
    failed = decode_to_server(said[HEADER_LEN:])
    assert isinstance(failed, Failed)
    assert failed.message.startswith("the server sent what cannot be read: ")


@pytest.mark.parametrize("name", TRUNCATED)
def test_the_engine_ends_when_a_frame_breaks_off(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, messages = run_engine(SUBMIT + TRUNCATED[name], monkeypatch)
    assert code == 0, "the server has gone, which is nothing to complain about"
    assert not any(isinstance(message, Failed) for message in messages)


@settings(deadline=None, max_examples=300)
@given(body=st.binary(max_size=200))
def test_random_bytes_are_a_message_or_damaged(body: bytes) -> None:
    for decode in (decode_to_engine, decode_to_server):
        with suppress(msgspec.DecodeError, RecursionError):
            decode(body)


@pytest.mark.parametrize("whole", [START, SUBMIT, READY, TOKENS])
@settings(deadline=None, max_examples=150)
@given(flips=FLIPS)
def test_flipped_bits_are_a_message_or_damaged(whole: bytes, flips: list[tuple[int, int]]) -> None:
    """A value that no engine takes is an error of ours, which is told in one line too."""
    body = bytearray(whole[HEADER_LEN:])
    for place, bits in flips:
        body[place % len(body)] ^= bits
    decode = decode_to_engine if whole in (START, SUBMIT) else decode_to_server
    with suppress(msgspec.DecodeError, RecursionError, SpecdecError):
        decode(bytes(body))


SETUP = encode_frame(Setup({"default": "ok"}, {}, 100, 2**28))
RENDER = encode_frame(Render([], {}, True, False, 5.0))


@pytest.mark.parametrize("name", DAMAGED | TRUNCATED)
@pytest.mark.parametrize("before", [b"", SETUP + RENDER], ids=["at once", "later"])
def test_a_template_worker_ends_at_a_damaged_frame_with_at_most_one_line(
    name: str, before: bytes
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "specdec.server.template_worker", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.PIPE,
            text=True,
        )
        ours.sendall(before + (DAMAGED | TRUNCATED)[name])
        if name in TRUNCATED or name == "too long":
            ours.shutdown(socket.SHUT_WR)
        _, said = process.communicate(timeout=20)
    assert said.count("\n") <= 1, said
    assert "Traceback" not in said
