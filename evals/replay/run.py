"""Run: a replay from its options to its report, everything checked before anything is replayed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals.acceptance.setting import Sweep
from specdec.evals.data.sample import Sample
from specdec.evals.replay.bench import replay_all
from specdec.evals.replay.costs import read_cost
from specdec.evals.replay.recording import Recording, recordings
from specdec.evals.replay.report import NAME, report_of
from specdec.evals.replay.target import load_drafter, read_model
from specdec.evals.report.journal import Journal
from specdec.evals.report.machine import origin
from specdec.evals.report.report import Report, ReportFolder


@dataclass(frozen=True)
class ReplaySettings:
    """What to replay. `config` is the engine's, whose drafter and node budget the sweep replaces.

    `max_tokens` ends longer answers; `step_cost` is a file of step costs or "measured", to predict
    speed by.
    """

    config: EngineConfig
    samples: Sequence[Sample]
    sweep: Sweep
    max_tokens: int | None = None
    step_cost: str | None = None


def run(settings: ReplaySettings, out: Path | None) -> Report:
    """Replay, and write everything to `out`; an interrupted run goes on where it was.

    Example: `run(ReplaySettings(config, samples, Sweep(("suffix",), (4, 16))), None).text()`.
    """
    folder = ReportFolder(out, NAME)
    loaded = read_model(settings.config)
    for drafter in settings.sweep.drafters:
        load_drafter(loaded, replace(settings.config, drafter=drafter))
    recorded = recordings(settings.samples, loaded, settings.max_tokens)
    cost_words, cost = None, None
    if settings.step_cost is not None:
        cost_words, cost = read_cost(settings.step_cost, loaded)
    head = {
        "model": settings.config.model,
        "max_tokens": settings.max_tokens,
        "max_model_len": loaded.max_model_len,
        "token_budget": settings.config.token_budget,
        "step_cost": cost_words,
    }
    # Without a curve there is nothing to say of plain decoding: it has one token per step.
    chosen = [item for item in settings.sweep.settings() if cost is not None or not item.is_plain]
    if not chosen:
        raise UsageError("plain decoding has nothing to replay: name a --drafter that drafts")
    costs = None if cost is None else _digest(cost.as_json())
    decisive = {**head, **asdict(settings.sweep), "recordings": _words(recorded), "costs": costs}
    journal = Journal(out / f"{NAME}.part.jsonl" if out else None, decisive)
    with journal:
        found = replay_all(settings.config, loaded, chosen, recorded, journal, cost)
    report = report_of({**origin(), **head}, found)
    folder.write(report)
    journal.discard()
    return report


def _words(recorded: Sequence[Recording]) -> str:
    return _digest(
        [(one.answer_id, one.params.seed, one.prompt_ids, one.output_ids) for one in recorded]
    )


def _digest(found: Any) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
