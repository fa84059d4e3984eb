"""LatencyCase: a latency measurement of a toy model, small enough for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from specdec.config import Backend
from specdec.evals.client.exchange import Arrival
from specdec.evals.data.sample import Sample
from specdec.evals.latency import lineup, peers
from specdec.evals.latency.bench import measure
from specdec.evals.latency.contender import Contender, Question, Run
from specdec.evals.latency.peer_setup import PeerSetup
from specdec.evals.latency.peers import PeerKind
from specdec.evals.latency.settings import LatencySettings
from specdec.evals.latency.side import Side
from specdec.evals.report.journal import Journal
from tests.evals.toy_folder import toy_config

SAMPLES = tuple(
    Sample(name, task, ({"role": "user", "content": text},))
    for name, task, text in (
        ("first", "chat", "Why?"),
        ("second", "echo", "abcabcabcabc"),
        ("third", "echo", "xyxyxyxyxy"),
    )
)
ROWS, CONTEXTS, ROUNDS, REPEATS = (1, 3), (20, 40), 2, 2


@dataclass
class EchoPeer:
    """Answers with zeros in steps of as many tokens as it guesses and one more, a second each."""

    asked: list[tuple[int | None, Question]] = field(default_factory=list)

    def contender(self, lookup: int | None) -> Contender:
        size = 1 + (lookup or 0)

        def run(question: Question) -> Run:
            self.asked.append((lookup, question))
            total = question.num_tokens
            sizes = [min(size, total - done) for done in range(0, total, size)]
            arrivals = tuple(Arrival(float(at), size) for at, size in enumerate(sizes, start=1))
            return Run((0,) * total, float(len(sizes)), arrivals)

        return run


@contextmanager
def echo_peer() -> Iterator[EchoPeer]:
    """Inside, --vs knows `echo` and `echo:lookup`, which tries 1 and 3 tokens at a time."""
    peer = EchoPeer()

    def check(setup: PeerSetup) -> None:
        """It is always there."""

    kind = PeerKind("nothing", check, lambda setup: peer, (1, 3))
    with patch.dict(peers.PEERS, {"echo": kind}), patch.object(lineup, "REST_S", 0):
        yield peer


def toy_settings(folder: Path, backend: Backend, **changes: Any) -> LatencySettings:
    """Two rounds of three prompts of two tasks."""
    settings: dict[str, Any] = {
        "sides": (Side.parse("ngram@fixed"), Side.parse("suffix")),
        "peers": ("echo", "echo:lookup"),
        "samples": SAMPLES,
        "max_tokens": 8,
        "rounds": ROUNDS,
        "rows": ROWS,
        "contexts": CONTEXTS,
        "repeats": REPEATS,
        "num_streams": 2,
        "stream_steps": 2,
        "prefill_len": 30,
        "buffer_bytes": 2**20,
        **changes,
    }
    return LatencySettings(toy_config(folder, backend), **settings)


def measured(settings: LatencySettings, file: Path | None = None) -> dict[str, Any]:
    """As the command does."""
    with echo_peer(), Journal(file, settings.as_json()) as journal:
        return measure(settings, settings.check(), journal)
