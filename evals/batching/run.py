"""Run: every policy with every number of slots, in steps and at the price of measured ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.config import EngineConfig
from specdec.evals.batching.policies import Schedule, policies
from specdec.evals.batching.report import NAME, report_of
from specdec.evals.batching.workload import Workload
from specdec.evals.report.machine import origin
from specdec.evals.report.report import Report, ReportFolder
from specdec.evals.report.spread import percentile

Price = Callable[[int], float]  # requests in a step to its seconds


@dataclass(frozen=True)
class BatchingSettings:
    """What to simulate; fields as in Workload.drawn.

    With a `config`, its model's steps are measured to price the simulated ones.
    """

    num_requests: int
    shortest: int
    longest: int
    slots: Sequence[int]
    seed: int
    rate: float
    max_wait: int
    generator: str
    config: EngineConfig | None = None


def run(settings: BatchingSettings, out: Path | None) -> Report:
    """Simulate, and write everything to `out`.

    Example: `run(BatchingSettings(1000, 10, 500, (8, 32), 7, 0.0, 16, "python"), None).text()`.
    """
    folder = ReportFolder(out, NAME)
    workload = Workload.drawn(
        settings.num_requests,
        settings.shortest,
        settings.longest,
        seed=settings.seed,
        rate=settings.rate,
        generator=settings.generator,
    )
    price = None if settings.config is None else measured_price(settings.config, settings, workload)
    schedules = {
        (num_slots, name): policy(workload, num_slots)
        for num_slots in settings.slots
        for name, policy in policies(settings.max_wait).items()
    }
    head: dict[str, Any] = {**origin(), **asdict(settings), "tokens": sum(workload.lengths)}
    head["slots"] = list(settings.slots)
    rows = [
        {"slots": num_slots, "policy": name, **_figures(schedule, price)}
        for (num_slots, name), schedule in schedules.items()
    ]
    report = report_of(head, rows, schedules)
    folder.write(report)
    return report


def measured_price(config: EngineConfig, settings: BatchingSettings, workload: Workload) -> Price:
    """The seconds of a decode step by its requests, each with a mean request's context."""
    from specdec.cost_profile import measured_cost
    from specdec.loading import load_model, make_kv_cache
    from specdec.model_runner import ModelRunner

    loaded = load_model(config)
    runner = ModelRunner(loaded.model, make_kv_cache(config, loaded.model, loaded.max_model_len))
    runner.warm_up(0, config.token_budget)
    cost = measured_cost(loaded, runner, config)
    context = sum(workload.lengths) // len(workload.lengths)
    prices = [0.0] + [
        float(cost.forward_s(number, context, number)[number])
        for number in range(1, max(settings.slots) + 1)
    ]
    return prices.__getitem__


def _figures(schedule: Schedule, price: Price | None) -> dict[str, Any]:
    tokens = sum(schedule.workload.lengths)
    found: dict[str, Any] = {
        "steps": schedule.num_steps,
        "idle_steps": schedule.num_idle,
        "utilisation": schedule.utilisation,
        "wait_steps": _spread(schedule.waits),
        "latency_steps": _spread(schedule.latencies),
        "seconds": None,
        "tokens_per_second": None,
    }
    if price is not None:
        counts = np.bincount(schedule.active).tolist()
        seconds = sum(count * price(number) for number, count in enumerate(counts) if number)
        found |= {"seconds": seconds, "tokens_per_second": tokens / seconds}
    return found


def _spread(steps: Sequence[int]) -> dict[str, float]:
    return {
        "mean": sum(steps) / len(steps),
        **{f"p{percent}": percentile(steps, percent) for percent in (50, 99)},
    }
