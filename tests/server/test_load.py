"""Many clients at once, for as long as one likes: answers stay the same and nothing is left over.

SPECDEC_LOAD_S=600 makes the load last ten minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import RunningServer, make_folder
from tests.server.real_engine import add_weights
from tests.server.workload import MAX_CHOICES, MAX_TOKENS, Job, Outcome
from tests.toy import compiled_native

LOAD_S = min(600.0, float(os.environ.get("SPECDEC_LOAD_S", "20")))
WARM_UP_SHARE = 0.25  # of the load; caches and allocators fill
NUM_CLIENTS = 24
NUM_JOBS = 32
SAMPLE_S = 0.1  # between two looks at resident memory
SETTLE_S = 0.5  # connections that were closed are gone by then

# Clients never have more in flight than this, so neither process need ever grow by more: a token
# with five likely others is a record of 7 small objects in the engine, and in the server the same
# again, 12 of log-probabilities with their texts and bytes, and 1 KiB of JSON: 4 KiB with room.
TOKEN_BYTES = 4096
MOST_IN_FLIGHT = NUM_CLIENTS * MAX_CHOICES * MAX_TOKENS * TOKEN_BYTES

# The real engine with a cache so small that requests preempt each other; SIGUSR1 makes it say
# what it holds. Written aside and renamed, so that nobody reads half of it.
ENGINE = """
import json, os, signal, socket, sys
from dataclasses import replace
from pathlib import Path
from specdec.engine import Engine
from specdec.server import engine_process
signal.signal(signal.SIGINT, signal.SIG_IGN)
def build(config):
    engine = Engine(replace(config, kv_memory_mib=1))
    def report(*_):
        facts = {
            "pid": os.getpid(),
            "num_waiting": len(engine.scheduler.waiting),
            "num_running": len(engine.scheduler.running),
            "num_held": engine.pool.num_blocks - engine.pool.num_free,
            "has_work": engine.has_work,
        }
        path = Path(config.model, "report.json")
        path.with_suffix(".new").write_text(json.dumps(facts))
        os.replace(path.with_suffix(".new"), path)
    signal.signal(signal.SIGUSR1, report)
    report()
    return engine
with socket.socket(fileno=int(sys.argv[1])) as sock:
    sys.exit(engine_process.run(sock, build))
"""


@dataclass
class Load:
    """Clients that ask all at once until the time is over."""

    server: RunningServer
    jobs: list[Job]
    alone: list[Outcome]  # what each job is answered when nothing else runs
    until: float  # seconds of time.monotonic
    done: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def run(self, client: int) -> None:
        """One client: random jobs in random ways, one after the other."""
        draw = random.Random(client)
        while time.monotonic() < self.until and not self.complaints:
            try:
                self._one(draw)
            except Exception as error:  # else it would end this thread alone, unseen
                self.complaints.append(f"{type(error).__name__}: {error}")

    def _one(self, draw: random.Random) -> None:
        idx = draw.randrange(len(self.jobs))
        job = self.jobs[idx].with_fields(priority=draw.randrange(-1, 2))
        way = draw.choice(["whole", "stream", "stream", "abandon"])
        if way == "abandon":
            job.abandon(self.server, draw.randrange(6))
        else:
            fields: dict[str, Any] = {}
            if way == "stream":
                fields = {"stream": True, "stream_options": {"include_usage": True}}
            found = job.with_fields(**fields).send(self.server)
            if found != self.alone[idx]:
                self.complaints.append(f"{job} as {way}: {found}, alone {self.alone[idx]}")
        self.done[way] += 1


@dataclass(frozen=True)
class Process:
    """A process as Linux sees it."""

    pid: int

    @property
    def num_resident(self) -> int:
        """Bytes of memory."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def files(self) -> Counter[str]:
        """What its descriptors are: paths, and how many pipes, sockets and the like.

        Less a socket for each child: the server starts a second process for templates when the
        first has much to do, and keeps it.
        """
        found: Counter[str] = Counter()
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since
                found[os.readlink(link).partition(":[")[0]] += 1
        found["socket"] -= sum(
            len(path.read_text().split())
            for path in Path(f"/proc/{self.pid}/task").glob("*/children")
        )
        return found


def engine_report(server: RunningServer) -> dict[str, Any]:
    """What the engine holds now."""
    path = server.folder / "report.json"
    pid = json.loads(path.read_text())["pid"]
    path.unlink()
    os.kill(pid, signal.SIGUSR1)
    server.eventually(path.exists, timeout_s=20)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def is_empty(report: dict[str, Any]) -> bool:
    """Whether the engine has no request and no block is held."""
    return not any(value for key, value in report.items() if key != "pid")


def left_open(server: RunningServer, processes: list[Process]) -> list[object]:
    """Descriptors of each process and tasks of the server."""
    return [*(process.files for process in processes), server.num_tasks]


def settled(server: RunningServer, processes: list[Process]) -> list[object]:
    """What is open once it stays the same for a while."""
    found = left_open(server, processes)
    for _ in range(20):
        time.sleep(SETTLE_S)
        if found == (found := left_open(server, processes)):
            return found
    raise AssertionError(f"they keep changing: {found}")


@pytest.mark.timeout(LOAD_S + 180)
def test_a_loaded_server_neither_changes_answers_nor_grows(tmp_path: Path) -> None:
    compiled_native()
    add_weights(make_folder(tmp_path))
    server = RunningServer(
        tmp_path, engine_command=(sys.executable, "-c", ENGINE), control="adaptive"
    )
    try:
        server.wait_ready()
        processes = [Process(server.process.pid), Process(engine_report(server)["pid"])]
        jobs = [Job.draw(number) for number in range(NUM_JOBS)]
        alone = [job.send(server) for job in jobs]
        assert [outcome.error for outcome in alone if outcome.error] == []
        assert jobs[0].with_fields(stream=True).send(server).error == ""  # starts what streams need
        before = settled(server, processes)

        start = time.monotonic()
        load = Load(server, jobs, alone, until=start + LOAD_S)
        clients = [threading.Thread(target=load.run, args=(k,)) for k in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        memory = sampled(processes, start + WARM_UP_SHARE * LOAD_S, load)
        for client in clients:
            client.join(timeout=60)
        assert not any(client.is_alive() for client in clients)
        assert load.complaints == []
        assert load.done.keys() == {"whole", "stream", "abandon"}

        server.eventually(lambda: is_empty(engine_report(server)), timeout_s=20)
        server.eventually(lambda: left_open(server, processes) == before, timeout_s=20)
        for name, series in zip(("server", "engine"), memory, strict=True):
            third = len(series) // 3
            first, last = statistics.mean(series[:third]), statistics.mean(series[-third:])
            print(f"{name}: {first / 2**20:.1f} MiB, then {last / 2**20:.1f}; {dict(load.done)}")
            assert last - first < MOST_IN_FLIGHT, f"the {name}'s memory grows: {series}"
    finally:
        complaints = server.end()
    assert complaints == ""
    assert server.process.returncode == 0


def sampled(processes: list[Process], begin: float, load: Load) -> list[list[int]]:
    """Resident bytes of each process from `begin` to the end of the load."""
    series: list[list[int]] = [[] for _ in processes]
    while (now := time.monotonic()) < load.until and not load.complaints:
        if now >= begin:
            for process, values in zip(processes, series, strict=True):
                values.append(process.num_resident)
        time.sleep(SAMPLE_S)
    return series
