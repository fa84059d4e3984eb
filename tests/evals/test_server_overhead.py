"""What the server adds, as the benchmark reckons it, and that it runs against a real server."""

from __future__ import annotations

import json
import socket
import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import EngineConfig
from specdec.errors import SpecdecError
from specdec.evals import bench_commands
from specdec.evals.load import overhead as server_overhead
from specdec.evals.load.overhead import OverheadSettings, Timing, crowd_summary, measure, summary
from specdec.evals.load.served import Stream
from tests.server.conftest import make_folder
from tests.server.real_engine import add_weights
from tests.toy import compiled_native

if TYPE_CHECKING:
    from pathlib import Path

OPENING = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"a \\"content\\" of x"}}]}\n\n'


def received(parts: list[bytes]) -> list[float]:
    """Arrivals of these parts, each one read of a socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send = threading.Thread(target=lambda: [theirs.send(part) for part in [*parts, b""]])
        send.start()
        try:
            return list(Stream(ours, 0.0).arrivals())
        finally:
            send.join()


@given(num_tokens=st.integers(0, 6), cuts=st.sets(st.integers(1, 400), max_size=12))
def test_every_token_is_noted_once_however_the_bytes_are_cut(
    num_tokens: int, cuts: set[int]
) -> None:
    wire = OPENING + num_tokens * TOKEN + b"data: [DONE]\n\n"
    ends = [0, *sorted(cut for cut in cuts if cut < len(wire)), len(wire)]
    parts = [wire[a:b] for a, b in pairwise(ends)]
    arrivals = received(parts)
    assert len(arrivals) == num_tokens
    assert arrivals == sorted(arrivals)


def test_an_error_on_the_wire_is_not_an_answer() -> None:
    with pytest.raises(SpecdecError, match="the server refused"):
        received([OPENING, b'data: {"error":{"message":"full"}}\n\n'])


def timing(first_ms: float, *steps_ms: float) -> Timing:
    return Timing(first_ms / 1e3, tuple(step / 1e3 for step in steps_ms))


def test_what_is_added_is_the_median_of_the_rounds_differences() -> None:
    alone = [timing(30, 9, 9, 10), timing(60, 18, 18, 18), timing(30, 9, 9, 9)]
    server = [timing(33, 9.2, 9.2, 9), timing(64, 18.2, 30, 18.1), timing(90, 9.4, 9.4, 9.4)]
    found = summary({"alone": alone, "server": server})
    assert found["added"] == {"step_ms": pytest.approx(0.2), "first_ms": pytest.approx(4)}
    assert found["holds"] == {"step": True, "first": True}
    late = summary({"alone": alone, "server": [timing(36, 9.4), timing(66, 18.4), timing(36, 9.4)]})
    assert late["holds"] == {"step": False, "first": False}


def test_a_crowd_is_felt_from_a_tenth_on() -> None:
    firsts = ([timing(10, 1)] * 3, [timing(11, 1), timing(10.5, 1), timing(40, 1)])
    found = crowd_summary(firsts, [([1.0, 2.0, 3.0], [2.0, 2.3, 9.0])] * 3, num_idle=100)
    assert (found["first_ratio"], found["step_ratio"]) == (1.1, 1.15)
    assert found["holds"] == {"first": True, "step": False}


def test_it_measures_a_server_in_a_crowd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled_native()
    add_weights(make_folder(tmp_path / "model"))
    config = EngineConfig(model=str(tmp_path / "model"))
    found = measure(OverheadSettings(config, rounds=1, steps=8, num_idle=5))
    assert found["sides"]["server"]["first_ms"]["p50"] > 0
    assert found["crowd"]["num_idle"] == 5
    monkeypatch.setattr(server_overhead, "measure", lambda settings: found)
    exits = []
    for as_json in (False, True):
        with pytest.raises(typer.Exit) as stop:
            bench_commands.bench_server(as_json=as_json)
        exits.append(stop.value.exit_code)
    shown, _, line = capsys.readouterr().out.rstrip().rpartition("\n")
    assert "the server adds" in shown
    assert json.loads(line) == found
    holds = all((*found["holds"].values(), *found["crowd"]["holds"].values()))
    assert exits == [not holds] * 2
