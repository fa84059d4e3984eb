"""Crossover: from how many streams on drafts stop paying, and who is faster, ours or peers.

Every side serves the same tasks with the same model at each concurrency in turn, in another order
in each cell and round, so that all sides meet the same machine. Ours must answer as plain decoding
does, token by token, and everybody with as many tokens, so tokens per second compare equal work.
The prefix cache is off: a hit would make later rounds cheaper, and nothing of it depends on the
setting. What adaptive control learns is kept throughout, as in a server; its start-up profile and
a short run of each side at each concurrency before the first round are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.evals.crossover.closed_loop import ClosedLoop
from specdec.evals.crossover.labels import OURS
from specdec.evals.crossover.loop_run import CellRun
from specdec.evals.crossover.server_loop import ServerLoop
from specdec.evals.crossover.settings import CrossoverSettings
from specdec.evals.crossover.side import Loop, Setting, peer_loops
from specdec.evals.crossover.summary import ADAPTIVE, OFF, Cell, summary
from specdec.evals.crossover.workloads import Task, answers_of, with_lengths, workload
from specdec.evals.latency.peers import packages
from specdec.evals.report.journal import Journal
from specdec.evals.report.machine import origin, target
from specdec.evals.report.progress import progress
from specdec.loading import LoadedModel, load_model

WARM_UP_TOKENS = 32
PAUSE_S = 0.25  # before each run beside peers: threads of some of them spin for 0.2 s

Answers = dict[str, list[tuple[int, ...]]]  # plain decoding's, by kind and task


def measure(
    settings: CrossoverSettings, servers: Mapping[str, ServerLoop], journal: Journal
) -> dict[str, Any]:
    """Load, warm up, measure every run that the journal has not, sum up; ready for JSON.

    servers: those that `settings.check` gave. Raises UsageError before anything is measured if the
    KV cache is too small for all streams.
    """
    torch.manual_seed(0)
    bench = CrossoverBench(settings, load_model(settings.config), servers, journal)
    bench.measure()
    return bench.report()


class CrossoverBench:
    """An engine for each setting, over one model, peers beside it, and the tasks of each kind."""

    def __init__(
        self,
        settings: CrossoverSettings,
        loaded: LoadedModel,
        servers: Mapping[str, ServerLoop],
        journal: Journal,
    ) -> None:
        self._settings, self._loaded, self._journal = settings, loaded, journal
        self._servers = servers
        most = max(settings.concurrency)
        config = replace(
            settings.config,
            prefix_cache=False,
            max_running=max(most, settings.config.max_running),
        )
        plain = Setting.parse(OFF)
        engines = {
            setting.name: Engine(setting.config(config), loaded=loaded)
            for setting in dict.fromkeys((plain, *settings.settings))
        }
        asked = {
            kind: workload(
                kind, engines[OFF], settings.samples, settings.max_tokens, settings.temperature
            )
            for kind in settings.kinds
        }
        for engine in engines.values():
            _check_room(engine, most, [task for tasks in asked.values() for task in tasks])
        self._answers = self._plain_answers(asked, engines[OFF])
        self._tasks = {kind: with_lengths(asked[kind], self._answers[kind]) for kind in asked}
        own = [setting.name for setting in settings.settings]
        self._engines = {name: engines[name] for name in own}
        self._loops: dict[str, Loop] = {name: ClosedLoop(engines[name]) for name in own}
        self._loops |= peer_loops(settings.peers, settings.peer_setup(), servers)

    def _plain_answers(self, asked: Mapping[str, Sequence[Task]], plain: Engine) -> Answers:
        """Which answers are right, and how long they are."""
        if "answers" not in self._journal:
            with progress(len(asked)) as advance:
                found = {}
                for kind, tasks in asked.items():
                    advance(f"lengths of {kind}")
                    found[kind] = answers_of(tasks, plain)
            self._journal.add("answers", found)
        kept = self._journal["answers"]
        return {kind: [tuple(answer) for answer in kept[kind]] for kind in asked}

    @property
    def _cells(self) -> list[Cell]:
        settings = self._settings
        return [Cell(kind, n) for kind in settings.kinds for n in settings.concurrency]

    def _keys(self) -> dict[str, tuple[Cell, str]]:
        """Everything to be measured, by its key in the journal, in order."""
        names = list(self._loops)
        keys = {}
        for index in range(self._settings.rounds):
            for number, cell in enumerate(self._cells):
                shift = (index + number) % len(names)
                for name in names[shift:] + names[:shift]:
                    keys[_key(index, cell, name)] = cell, name
        return keys

    def measure(self) -> None:
        """Warm up, then measure what the journal has not."""
        left = {key: of for key, of in self._keys().items() if key not in self._journal}
        if not left:
            return
        with progress(len(left) + len(self._loops)) as advance:
            for name in self._loops:
                advance(f"warm-up: {name}")
                self._warm_up(name)
            for key, (cell, name) in left.items():
                advance(key)
                self._journal.add(key, self._run(cell, name).as_json())

    def _warm_up(self, name: str) -> None:
        """Short answers at each concurrency: compiles, fills caches and maps memory."""
        tasks = [
            replace(task, question=replace(task.question, num_tokens=WARM_UP_TOKENS))
            for task in self._tasks[self._settings.kinds[0]]
        ]
        for number in self._settings.concurrency:
            self._loops[name].run(tasks, number, 2 * number)

    def _run(self, cell: Cell, name: str) -> CellRun:
        if self._settings.peers:
            time.sleep(PAUSE_S)
        tasks = self._tasks[cell.kind]
        num_requests = self._settings.num_requests(cell.concurrency, len(tasks))
        run = self._loops[name].run(tasks, cell.concurrency, num_requests)
        return CellRun.of(run, self._answers[cell.kind])

    def report(self) -> dict[str, Any]:
        """Everything summed up."""
        runs = {
            cell: {
                name: [
                    CellRun.from_json(self._journal[_key(index, cell, name)])
                    for index in range(self._settings.rounds)
                ]
                for name in self._loops
            }
            for cell in self._cells
        }
        own_servers = [name for name, server in self._servers.items() if server.owner == OURS]
        ours = (*self._engines, *own_servers)
        peers = [name for name in self._loops if name not in ours]
        return {
            **origin(*packages(self._settings.peers)),
            **self._head(),
            **summary(runs, peers, own_servers),
            "unequal": unequal(runs, ours),
        }

    def _head(self) -> dict[str, Any]:
        settings, model = self._settings, self._loaded.model
        config, engines = settings.config, self._engines
        chosen = engines.get(ADAPTIVE)
        runs_with = chosen.config if chosen else config
        return {
            "target": target(config, model),
            "settings": {
                "concurrency": list(settings.concurrency),
                "settings": list(engines),
                "peers": [name for name in self._loops if name not in engines],
                "servers": {
                    name: f"{server.owner} {server.version}".strip()
                    for name, server in self._servers.items()
                },
                "kinds": list(settings.kinds),
                "tasks": {kind: len(tasks) for kind, tasks in self._tasks.items()},
                "rounds": settings.rounds,
                "temperature": settings.temperature,
                "max_tokens": settings.max_tokens,
                "num_tokens": {
                    kind: sum(task.question.num_tokens for task in tasks)
                    for kind, tasks in self._tasks.items()
                },
                "drafter": runs_with.drafter,
                "node_budget": runs_with.node_budget,
                "reason": chosen.reason if chosen else "",
                "token_budget": config.token_budget,
                "latency_weight": config.latency_weight,
                "prefix_cache": False,
            },
        }


def _key(index: int, cell: Cell, name: str) -> str:
    return f"round {index + 1}, {cell.kind}, {cell.concurrency} streams: {name}"


def _check_room(engine: Engine, num_streams: int, tasks: Sequence[Task]) -> None:
    """A preempted stream is computed again, and that is not what is to be measured."""
    longest = max(len(task.question.prompt_ids) + task.question.num_tokens for task in tasks)
    size = engine.pool.block_size
    need = num_streams * -(-(longest + engine.controller.node_budget) // size)
    have = engine.pool.num_blocks
    if need > have:
        mib = -(-engine.config.kv_memory_mib * need // have)
        raise UsageError(
            f"{num_streams} streams of {longest} tokens need --kv-memory-mib {mib}, "
            "or a smaller --concurrency"
        )


def unequal(
    runs: Mapping[Cell, Mapping[str, Sequence[CellRun]]], ours: Sequence[str]
) -> list[dict[str, Any]]:
    """Answers of ours that are not plain decoding's; others' sums in other precisions may part."""
    return [
        {
            "kind": cell.kind,
            "concurrency": cell.concurrency,
            "setting": name,
            "task": task,
            "num_equal": num_equal,
        }
        for cell, sides in runs.items()
        for name, own in sides.items()
        if name in ours
        for run in own
        for task, num_equal in run.parted or ()
    ]
