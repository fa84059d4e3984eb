"""Crossover: from how many streams on drafts stop paying, and whether adaptive control sees it.

Every setting serves the same tasks with the same model at each concurrency in turn, in another
order in each round, so that all settings meet the same machine. Answers must be equal token by
token wherever they are given, so tokens per second compare equal work. The prefix cache is off: a
hit would make later rounds cheaper, and nothing of it depends on the setting. What adaptive control
learns is kept throughout, as in a server; its start-up profile and a first round are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specdec.config import Control, EngineConfig
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.evals.crossover.closed_loop import ClosedLoop, LoopRun
from specdec.evals.crossover.report import report_of
from specdec.evals.crossover.summary import ADAPTIVE, OFF, Cell, summary
from specdec.evals.crossover.workloads import WorkloadSettings, check_kind, workload
from specdec.evals.latency.contender import num_equal
from specdec.evals.report.machine import origin, target
from specdec.evals.report.progress import progress
from specdec.evals.report.report import ReportFolder, show
from specdec.loading import LoadedModel, load_model


@dataclass(frozen=True)
class Setting:
    """How draft nodes are budgeted: off, fixed:N or adaptive."""

    name: str
    control: Control
    node_budget: int | None = None  # None: the configuration's

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Example: `Setting.parse("fixed:4")`. Raises UsageError for anything else."""
        if text == OFF:
            return cls(OFF, "fixed", 0)
        if text == ADAPTIVE:
            return cls(ADAPTIVE, "adaptive")
        kind, _, number = text.partition(":")
        if kind != "fixed" or not number.isdecimal() or int(number) == 0:
            raise UsageError(f"unknown setting {text!r}; use off, fixed:N (N from 1) or adaptive")
        return cls(f"fixed:{int(number)}", "fixed", int(number))

    def config(self, config: EngineConfig) -> EngineConfig:
        """The configuration with this setting. Raises UsageError for too many nodes."""
        budget = config.node_budget if self.node_budget is None else self.node_budget
        return replace(config, control=self.control, node_budget=budget)


@dataclass(frozen=True)
class CrossoverSettings:
    """What to measure; at each concurrency the larger of `min_requests` and twice it is counted.

    Raises UsageError for a kind that there is not, or for settings or concurrencies that make no
    sense.
    """

    config: EngineConfig
    concurrency: tuple[int, ...]
    settings: tuple[Setting, ...]
    kinds: tuple[str, ...]
    work: WorkloadSettings = field(default_factory=WorkloadSettings)
    rounds: int = 5
    min_requests: int = 12

    def __post_init__(self) -> None:
        for kind in self.kinds:
            check_kind(kind)
        for name, values in (
            ("concurrency", self.concurrency),
            ("setting", tuple(setting.name for setting in self.settings)),
            ("kind", self.kinds),
        ):
            if not values or len(set(values)) < len(values):
                raise UsageError(f"name every {name} once")
        if min(self.concurrency) < 1:
            raise UsageError(f"concurrency must be at least 1, not {min(self.concurrency)}")
        for setting in self.settings:
            setting.config(self.config)

    def num_requests(self, concurrency: int) -> int:
        """Requests that are counted in one run."""
        return max(self.min_requests, 2 * concurrency)


def parse_streams(text: str) -> tuple[int, ...]:
    """Example: `parse_streams("1,4,16")`. Raises UsageError for what are no numbers."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise UsageError(f"--concurrency takes numbers and commas, as 1,4,16, not {text}") from None


def run(
    settings: CrossoverSettings,
    out: Path | None = None,
    *,
    as_json: bool = False,
    must_hold: bool = False,
) -> int:
    """Measure, print, and write to the folder `out`.

    The exit code is 1 if answers differ, or if a bound fails that must hold. Raises UsageError,
    before anything is measured, if the files cannot be written.
    """
    folder = ReportFolder(out, "crossover")
    data = measure(settings)
    report = report_of(data)
    folder.write(report)
    show(report, as_json=as_json)
    is_failed = must_hold and any(bound["failed"] for bound in data["bounds"])
    return 1 if data["unequal"] or is_failed else 0


def measure(settings: CrossoverSettings) -> dict[str, Any]:
    """Load, warm up, measure every round, sum up; the report is ready for JSON.

    Raises UsageError before anything is measured if the KV cache is too small for all streams.
    """
    torch.manual_seed(0)
    return CrossoverBench(settings, load_model(settings.config)).report()


class CrossoverBench:
    """An engine for each setting, over one model, and the tasks of each kind of work."""

    def __init__(self, settings: CrossoverSettings, loaded: LoadedModel) -> None:
        self._settings, self._loaded = settings, loaded
        most = max(settings.concurrency)
        config = replace(
            settings.config,
            prefix_cache=False,
            max_running=max(most, settings.config.max_running),
        )
        engines = {
            setting.name: Engine(setting.config(config), loaded=loaded)
            for setting in settings.settings
        }
        self._config = config
        any_engine = next(iter(engines.values()))
        self._tasks = {kind: workload(kind, any_engine, settings.work) for kind in settings.kinds}
        for engine in engines.values():
            self._check_room(engine, most)
        self._loops = {name: ClosedLoop(engine) for name, engine in engines.items()}

    def _check_room(self, engine: Engine, num_streams: int) -> None:
        """A preempted stream is computed again, and that is not what is to be measured."""
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        longest = max(len(task.prompt_ids) + task.params.max_tokens for task in tasks)
        size = engine.pool.block_size
        need = num_streams * -(-(longest + engine.config.node_budget) // size)
        have = engine.pool.num_blocks
        if need > have:
            mib = -(-self._config.kv_memory_mib * need // have)
            raise UsageError(
                f"{num_streams} streams of {longest} tokens need --kv-memory-mib {mib}, "
                "or a smaller --concurrency"
            )

    def report(self) -> dict[str, Any]:
        """Measure everything and sum it up."""
        settings = self._settings
        names = [setting.name for setting in settings.settings]
        cells = [Cell(kind, number) for kind in settings.kinds for number in settings.concurrency]
        runs: dict[Cell, dict[str, list[LoopRun]]] = {
            cell: {name: [] for name in names} for cell in cells
        }
        answers = Answers()
        with progress((settings.rounds + 1) * len(cells) * len(names)) as advance:
            for index in range(settings.rounds + 1):  # round 0 warms up
                shift = index % len(names)
                for cell in cells:
                    for name in names[shift:] + names[:shift]:
                        advance(f"round {index}, {cell.kind}, {cell.concurrency} streams: {name}")
                        run = self._loops[name].run(
                            self._tasks[cell.kind],
                            cell.concurrency,
                            settings.num_requests(cell.concurrency),
                        )
                        answers.check(cell, name, run)
                        if index:
                            runs[cell][name].append(run)
        return {**self._head(), **summary(runs), "unequal": answers.unequal}

    def _head(self) -> dict[str, Any]:
        settings, config, model = self._settings, self._config, self._loaded.model
        return {
            **origin(),
            "target": target(config, model),
            "settings": {
                "concurrency": list(settings.concurrency),
                "settings": [setting.name for setting in settings.settings],
                "kinds": list(settings.kinds),
                "tasks": {kind: len(tasks) for kind, tasks in self._tasks.items()},
                "rounds": settings.rounds,
                "max_tokens": settings.work.max_tokens,
                "num_requests": [settings.num_requests(number) for number in settings.concurrency],
                "drafter": config.drafter,
                "node_budget": config.node_budget,
                "token_budget": config.token_budget,
                "latency_weight": config.latency_weight,
                "prefix_cache": config.prefix_cache,
            },
        }


class Answers:
    """The one right answer to each task, and what differs from it."""

    def __init__(self) -> None:
        self.unequal: list[dict[str, Any]] = []
        self._expected: dict[tuple[str, int], tuple[int, ...]] = {}

    def check(self, cell: Cell, setting: str, run: LoopRun) -> None:
        """Hold a run's answers against those of all runs before it; the first one is right."""
        for number, token_ids in run.answers:
            expected = self._expected.setdefault((cell.kind, number), token_ids)
            if token_ids != expected:
                self.unequal.append(
                    {
                        "kind": cell.kind,
                        "concurrency": cell.concurrency,
                        "setting": setting,
                        "task": number,
                        "num_equal": num_equal(token_ids, expected),
                    }
                )
