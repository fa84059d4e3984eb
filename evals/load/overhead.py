"""ServerOverhead: what the server adds to the engine alone, per step and to the first token.

Both sides answer the same prompts in turn, one stream, plain decoding, so that a step is as short
as it gets. A client on this machine notes when each chunk arrives; the engine alone notes when its
step ends. The crowd is what must not be felt: a hundred open streams that have nothing to send and
a reader that has stopped reading.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.evals.load.served import WAIT_S, Served, Stream
from specdec.evals.report.machine import origin, target
from specdec.evals.report.progress import progress
from specdec.evals.report.spread import spread_ms
from specdec.loading import load_model
from specdec.params import SamplingParams
from specdec.request import Request

MAX_STEP_MS, MAX_FIRST_MS, MAX_CROWD = 0.3, 5.0, 1.10  # what the server promises
MOST_STEPS = 400
BIAS = 100.0
PROMPT = "This is note {number}. Continue this list of useful words, one a line:\nwater\nbread\n"


@dataclass(frozen=True)
class OverheadSettings:
    """`steps` tokens are generated per answer; a crowd is `num_idle` streams and a slow reader."""

    config: EngineConfig
    rounds: int = 7
    steps: int = 96
    num_idle: int = 100


@dataclass(frozen=True)
class Timing:
    """One answer: seconds to the first token, and of each step after it."""

    first_s: float
    steps_s: tuple[float, ...]

    @classmethod
    def of(cls, begun: float, arrivals: Sequence[float]) -> Timing:
        return cls(arrivals[0] - begun, _gaps(arrivals))

    @property
    def step_s(self) -> float:
        """Of the median step."""
        return statistics.median(self.steps_s)


Side = Callable[[str, int], Timing]  # answers a prompt with so many tokens


class Alone:
    """The engine in this process, without a server around it."""

    def __init__(self, config: EngineConfig) -> None:
        self.loaded = load_model(config)
        self._engine = Engine(config, loaded=self.loaded)
        # One letter over and over: whatever the model, each token is a chunk with text.
        self._letter = self._engine.tokenizer.encode("a", add_special_tokens=False)[-1]

    @property
    def fields(self) -> dict[str, object]:
        """What makes a server give the same answers."""
        return {"logit_bias": {str(self._letter): BIAS}}

    def run(self, prompt: str, num_tokens: int) -> Timing:
        """Answer a prompt; tokenising it and rendering the template count, as for the server."""
        engine, arrivals = self._engine, list[float]()
        begun = time.perf_counter()
        ids = engine.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        params = SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, logit_bias={self._letter: BIAS}
        )
        engine.add(Request(prompt, tuple(ids), params))
        while engine.has_work:
            if any(output.tokens for output in engine.step()):
                arrivals.append(time.perf_counter())
        return Timing.of(begun, arrivals)


def measure(settings: OverheadSettings) -> dict[str, Any]:
    """Measure both sides in turn, then a server in a crowd; ready for JSON.

    Example: `measure(OverheadSettings(EngineConfig()))["added"]["step_ms"]`.
    """
    config = replace(settings.config, drafter="none", control="fixed", node_budget=0)
    rounds = range(settings.rounds)
    sides: dict[str, list[Timing]] = {"alone": [], "server": []}
    with ExitStack() as stack, progress(settings.rounds + 4) as advance:
        advance("loading")
        alone = Alone(config)
        server = stack.enter_context(Served.start(config))
        served = server_run(server, alone.fields)
        for side in (alone.run, served):
            side(PROMPT.format(number=0), 8)
        for number in rounds:
            advance(f"round {number + 1}")
            ways = [("alone", alone.run), ("server", served)]
            for name, run in ways if number % 2 else reversed(ways):
                prompt = PROMPT.format(number=f"{100 * number + len(name)}")
                sides[name].append(run(prompt, settings.steps))
        advance("first tokens in a crowd")
        first_tokens = first_in_crowd(server, settings, served)
        advance("steps in a crowd")
        narrow = stack.enter_context(Served.start(replace(config, max_running=1)))
        steps = steps_in_crowd(narrow, settings, alone.fields)
    return {
        **origin(),
        "target": target(config, alone.loaded.model),
        "rounds": settings.rounds,
        "steps": settings.steps,
        **summary(sides),
        "crowd": crowd_summary(first_tokens, steps, settings.num_idle),
    }


def server_run(server: Served, fields: Mapping[str, object]) -> Side:
    """The server as a side; `fields` go into every request."""

    def run(prompt: str, num_tokens: int) -> Timing:
        with server.stream(prompt, num_tokens, **fields) as stream:
            return Timing.of(stream.begun, list(stream.arrivals()))

    return run


def first_in_crowd(
    server: Served, settings: OverheadSettings, run: Side
) -> tuple[list[Timing], list[Timing]]:
    """Answers without and with the crowd of connections that stay open, in turn."""
    without, within = list[Timing](), list[Timing]()

    def first(number: int, place: int) -> Timing:
        run(PROMPT.format(number=f"7{number}{place}"), 4)  # what ran before must not tell
        return run(PROMPT.format(number=f"9{number}{place}"), 16)

    for number in range(settings.rounds):
        without.append(first(number, 1))
        with server.slow_reader(), server.open_connections(settings.num_idle):
            within.append(first(number, 2))
    return without, within


def steps_in_crowd(
    server: Served, settings: OverheadSettings, fields: Mapping[str, object]
) -> list[tuple[Sequence[float], Sequence[float]]]:
    """Steps of one stream before and after `num_idle` others joined that wait for it to end.

    The server runs one request at a time, so theirs are open streams with nothing to send.
    """
    found: list[tuple[Sequence[float], Sequence[float]]] = []
    with server.slow_reader():
        for number in range(settings.rounds):
            prompt = PROMPT.format(number=f"8{number}")
            with (
                server.stream(prompt, MOST_STEPS, **fields) as stream,
                recorded(stream) as arrivals,
            ):
                _wait_for(arrivals, settings.steps)
                before = list(arrivals)
                with idle_streams(server, settings.num_idle):
                    joined = len(arrivals)
                    _wait_for(arrivals, joined + settings.steps)
                    within = arrivals[joined : joined + settings.steps]
            found.append((_gaps(before), _gaps(within)))
    return found


@contextmanager
def recorded(stream: Stream) -> Iterator[list[float]]:
    """A stream's arrivals, noted in the background until the block is left."""
    arrivals: list[float] = []

    def record() -> None:
        with suppress(OSError):  # the block was left
            for arrival in stream.arrivals():
                arrivals.append(arrival)

    thread = threading.Thread(target=record)
    thread.start()
    try:
        yield arrivals
    finally:
        stream.connection.shutdown(socket.SHUT_RDWR)
        thread.join()


def _wait_for(arrivals: Sequence[float], number: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while len(arrivals) < number:
        if time.monotonic() > deadline:
            raise SpecdecError(f"a stream brought {len(arrivals)} tokens, not {number}")
        time.sleep(0.01)


@contextmanager
def idle_streams(server: Served, num_streams: int) -> Iterator[list[Stream]]:
    """Streams that are open and silent: their requests wait behind the one that runs."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(server.stream(f"Wait {number}.", 1))
            for number in range(num_streams)
        ]


def _gaps(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(b - a for a, b in pairwise(times))


def summary(sides: Mapping[str, Sequence[Timing]]) -> dict[str, Any]:
    """Spread of each side, and what the server added: medians over rounds of the differences."""
    alone, server = sides["alone"], sides["server"]
    pairs = list(zip(alone, server, strict=True))
    step_ms = 1e3 * statistics.median(b.step_s - a.step_s for a, b in pairs)
    first_ms = 1e3 * statistics.median(b.first_s - a.first_s for a, b in pairs)
    return {
        "sides": {
            name: {
                "step_ms": spread_ms([s for timing in timings for s in timing.steps_s]),
                "first_ms": spread_ms([timing.first_s for timing in timings]),
            }
            for name, timings in sides.items()
        },
        "added": {"step_ms": round(step_ms, 4), "first_ms": round(first_ms, 3)},
        "holds": {"step": step_ms <= MAX_STEP_MS, "first": first_ms <= MAX_FIRST_MS},
    }


def crowd_summary(
    first_tokens: tuple[Sequence[Timing], Sequence[Timing]],
    steps: Sequence[tuple[Sequence[float], Sequence[float]]],
    num_idle: int,
) -> dict[str, Any]:
    """Ratios in the crowd over without it, medians over rounds."""
    first = statistics.median(b.first_s / a.first_s for a, b in zip(*first_tokens, strict=True))
    step = statistics.median(statistics.median(b) / statistics.median(a) for a, b in steps)
    return {
        "num_idle": num_idle,
        "first_ratio": round(first, 4),
        "step_ratio": round(step, 4),
        "holds": {"first": first <= MAX_CROWD, "step": step <= MAX_CROWD},
    }


def render(found: Mapping[str, Any]) -> str:
    """A few lines for the terminal."""
    sides, added, crowd = found["sides"], found["added"], found["crowd"]
    lines = [
        f"one stream, plain decoding, {found['rounds']} rounds of {found['steps']} tokens (ms)"
    ]
    for name, side in sides.items():
        step, first = side["step_ms"], side["first_ms"]
        lines.append(
            f"{name:>7}: step p50 {step['p50']:.2f} p99 {step['p99']:.2f}, "
            f"first token p50 {first['p50']:.1f}"
        )
    lines.append(
        f"the server adds {added['step_ms']:.3f} ms a step (at most {MAX_STEP_MS}) "
        f"and {added['first_ms']:.2f} ms to the first token (at most {MAX_FIRST_MS:g})"
    )
    lines.append(
        f"beside {crowd['num_idle']} idle streams and a slow reader: "
        f"step x{crowd['step_ratio']:.3f}, first token x{crowd['first_ratio']:.3f} "
        f"(at most x{MAX_CROWD:.2f})"
    )
    return "\n".join(lines)
