"""Run: a whole measurement of acceptance, from its settings to its files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig
from specdec.errors import SpecdecError, UsageError
from specdec.evals.acceptance.asker import Asker
from specdec.evals.acceptance.bench import measure
from specdec.evals.acceptance.in_process import InProcess
from specdec.evals.acceptance.report import NAME, report_of
from specdec.evals.acceptance.server import Server, check_settings
from specdec.evals.acceptance.setting import Setting, Sweep, check_drafters
from specdec.evals.data.sample import Sample, digest
from specdec.evals.report.journal import Journal
from specdec.evals.report.machine import origin, target
from specdec.evals.report.report import Report, ReportFolder
from specdec.params import MIN_TEMPERATURE

ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True)
class Address:
    """A server to be asked; without a model its first one."""

    url: str
    api_key: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class AcceptanceSettings:
    """What to run: in process by `config`, or with the server at `address`.

    `num_turns` bounds those of a sample. Without `uses_noise` drafters rank as if all requests
    were greedy. Raises UsageError for what cannot be run, before anything is loaded.

    Example: `AcceptanceSettings(samples, Sweep(("suffix",)), EngineConfig(control="fixed"))`.
    """

    samples: Sequence[Sample]
    sweep: Sweep
    config: EngineConfig
    max_tokens: int = 128
    num_turns: int | None = None
    uses_noise: bool = True
    address: Address | None = None

    def __post_init__(self) -> None:
        ids: set[str] = set()
        for sample in self.samples:
            if sample.sample_id in ids:
                raise UsageError(
                    f"two samples have the id {sample.sample_id!r}: give those of each file others"
                )
            ids.add(sample.sample_id)
        if self.address is not None:
            check_settings(self.sweep.settings())
        else:
            check_drafters(self.sweep.drafters)

    def as_json(self) -> dict[str, Any]:
        """What decides the answers; samples by a digest."""
        return {
            "samples": digest(self.samples),
            "sweep": asdict(self.sweep),
            "max_tokens": self.max_tokens,
            "num_turns": self.num_turns,
            **self._who_answers(),
        }

    def _who_answers(self) -> dict[str, Any]:
        if self.address is not None:
            return {"url": self.address.url, "model": self.address.model}
        return {"uses_noise": self.uses_noise, **asdict(self.config)}

    def must_be_equal(self, setting: Setting) -> bool:
        """Whether verification promises the plain answer, token by token."""
        if self.address is not None or self.config.verification == "coupled":
            return True
        return self.config.verification == "rejection" and setting.temperature < MIN_TEMPERATURE


def run(settings: AcceptanceSettings, out: Path | None = None) -> Report:
    """Measure, and write everything to `out`; an interrupted run goes on where it was."""
    folder = ReportFolder(out, NAME)
    journal = Journal(out / f"{NAME}.part.jsonl" if out else None, settings.as_json())
    with journal, _asker(settings) as (asker, where):
        found = measure(
            asker,
            settings.samples,
            journal,
            max_tokens=settings.max_tokens,
            num_turns=settings.num_turns,
        )
    if not found.answers:
        raise SpecdecError("no prompt left room in the context for an answer: ask for shorter ones")
    head = {
        **origin(*(["aiohttp"] if settings.address else [])),
        **where,
        "max_tokens": settings.max_tokens,
        "num_turns": settings.num_turns,
    }
    report = report_of(head, asker.settings, found, settings.must_be_equal)
    folder.write(report, {ANSWERS_FILE: "".join(f"{json.dumps(one)}\n" for one in found.recorded)})
    journal.discard()
    return report


@contextmanager
def _asker(settings: AcceptanceSettings) -> Iterator[tuple[Asker, dict[str, Any]]]:
    """Who answers, and what a report says of it."""
    wanted, address, config = settings.sweep.settings(), settings.address, settings.config
    if address is None:
        engines = InProcess(config, wanted, uses_noise=settings.uses_noise)
        loaded = engines.loaded
        for sample in settings.samples:
            sample.check_vocabulary(loaded.model.config.vocab_size, loaded.name)
        yield (
            engines,
            {
                **target(config, loaded.model),
                "control": config.control,
                "verification": config.verification,
                "uses_noise": settings.uses_noise,
            },
        )
        return
    is_chat = bool(settings.samples[0].messages)
    with Server.open(
        address.url, wanted, api_key=address.api_key, model=address.model, is_chat=is_chat
    ) as server:
        yield server, {"model": server.model, "url": address.url}
