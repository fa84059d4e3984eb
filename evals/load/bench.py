"""LoadBench: puts levels of load on a server, one after the other, and sums up each."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig
from specdec.evals.client.endpoint import Endpoint
from specdec.evals.load.extent import Extent
from specdec.evals.load.goals import Goals
from specdec.evals.load.level import Level
from specdec.evals.load.loops import run_level
from specdec.evals.load.prompts import Prompts, SamplePrompts
from specdec.evals.load.report import level_files, load_report
from specdec.evals.load.sender import Sender
from specdec.evals.load.served import Served
from specdec.evals.load.server_counts import ServerCounts
from specdec.evals.load.summary import Described, summarize
from specdec.evals.load.sweep import Series
from specdec.evals.report.journal import Journal
from specdec.evals.report.progress import Advance, progress
from specdec.evals.report.report import ReportFolder, show

NAME = "load"


@dataclass(frozen=True)
class LoadSettings:
    """What to run; without `url` each configuration of the series gets a server of its own.

    `asked` says in words what the prompts are. `timeout_s` bounds a whole answer.
    """

    levels: Sequence[Level]
    series: Sequence[Series]
    extent: Extent
    prompts: Prompts
    asked: str
    url: str | None = None
    api_key: str | None = None
    served_model: str | None = None
    temperature: float = 0.0
    burstiness: float = 1.0
    seed: int = 0
    goals: Goals | None = None
    price: float | None = None
    timeout_s: float = 600.0

    def as_json(self) -> dict[str, Any]:
        """All that decides the figures; no secrets."""
        return {
            "url": self.url,
            "model": self.served_model,
            "levels": [level.name for level in self.levels],
            "series": [
                {
                    "label": one.label,
                    "fields": dict(one.fields),
                    "server": None if one.config is None else dataclasses.asdict(one.config),
                }
                for one in self.series
            ],
            "extent": dataclasses.asdict(self.extent),
            "asked": self.asked,
            "temperature": self.temperature,
            "burstiness": self.burstiness,
            "seed": self.seed,
            "goals": str(self.goals) if self.goals else None,
            "price_per_hour": self.price,
        }


def run(settings: LoadSettings, out: Path | None, *, as_json: bool) -> int:
    """Measure, write, show; the exit code is 1 if a level was given up.

    Raises UsageError before anything is measured if the folder, the address or a value is wrong.
    """
    folder = ReportFolder(out, NAME)
    if settings.url is not None:
        Endpoint(settings.url)  # refuses what is no address
    with Journal(out / f"{NAME}.part.jsonl" if out else None, settings.as_json()) as journal:
        try:
            given_up = _measure(settings, journal)
        finally:
            if not len(journal):
                journal.discard()  # there is nothing to go on with
        levels = [journal[key] for key in _keys(settings) if key in journal]
    levels += [given_up] if given_up else []
    report = load_report(settings.as_json(), levels)
    files = level_files(levels)
    earlier = _earlier_files(out)
    folder.write(report, files)
    for file in earlier:
        if file.name not in files:
            file.unlink(missing_ok=True)  # else it would be taken for a level of this run
    if given_up is None:
        journal.discard()
    show(report, as_json=as_json)
    return 0 if given_up is None else 1


def _earlier_files(out: Path | None) -> list[Path]:
    """The files of levels that an earlier run left in the folder, by what its report says."""
    if out is None:
        return []
    try:
        levels = json.loads((out / f"{NAME}.json").read_text(encoding="utf-8"))["levels"]
        names = [str(level["file"]) for level in levels]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [out / name for name in names if name.startswith(f"{NAME}-") and "/" not in name]


def _keys(settings: LoadSettings) -> list[str]:
    return [_key(series, level) for series in settings.series for level in settings.levels]


def _key(series: Series, level: Level) -> str:
    return f"{series.label} {level.name}".strip()


def _measure(settings: LoadSettings, journal: Journal) -> dict[str, Any] | None:
    """Whatever is not in the journal yet, until a level has to be given up; that one, if any."""
    groups = [group for group in _groups(settings) if _left(settings, group, journal)]
    num_left = sum(len(_left(settings, group, journal)) for group in groups)
    with progress(num_left) as advance:
        for group in groups:
            with ExitStack() as stack:
                url = settings.url
                if url is None:
                    config = group[0].config
                    assert config is not None, "a server of our own has a configuration"
                    url = stack.enter_context(Served.start(config)).url
                given_up = asyncio.run(_run_group(settings, group, url, journal, advance))
            if given_up is not None:
                return given_up
    return None


def _groups(settings: LoadSettings) -> Iterator[list[Series]]:
    """Series that one server can answer, in turn at each level so that what drifts hits all."""
    groups: dict[EngineConfig | None, list[Series]] = {}
    for series in settings.series:
        groups.setdefault(series.config, []).append(series)
    yield from groups.values()


def _left(
    settings: LoadSettings, group: Sequence[Series], journal: Journal
) -> list[tuple[Level, Series]]:
    return [
        (level, series)
        for level in settings.levels
        for series in group
        if _key(series, level) not in journal
    ]


async def _run_group(
    settings: LoadSettings,
    group: Sequence[Series],
    url: str,
    journal: Journal,
    advance: Advance,
) -> dict[str, Any] | None:
    endpoint = Endpoint(url, api_key=settings.api_key, timeout_s=settings.timeout_s)
    async with endpoint:
        model = settings.served_model or await endpoint.model()
        sender = Sender(endpoint, model, settings.prompts, settings.temperature)
        await sender.find_out()
        for series in group:
            if series.fields:
                await sender.check(series)
        for level, series in _left(settings, group, journal):
            advance(_key(series, level))
            found = await _run_one(settings, level, series, endpoint, sender, model)
            if found["stopped"]:
                return found
            journal.add(_key(series, level), found)
    return None


async def _run_one(
    settings: LoadSettings,
    level: Level,
    series: Series,
    endpoint: Endpoint,
    sender: Sender,
    model: str,
) -> dict[str, Any]:
    before = ServerCounts.read(await endpoint.get_text("/metrics"))
    found = await run_level(
        level,
        sender.of(series, level),
        settings.extent.at(level),
        burstiness=settings.burstiness,
        seed=settings.seed,
    )
    after = ServerCounts.read(await endpoint.get_text("/metrics"))
    described = Described(
        model=series.config.model if series.config else model,
        label=series.label,
        endpoint_type="openai" if _completes(settings.prompts) else "openai-chat",
        burstiness=settings.burstiness,
        goals=settings.goals,
        price=settings.price,
    )
    counted = after.minus(before) if before and after else None
    return {
        **summarize(found, described, counted),
        "refused_fields": list(sender.refused),
        "is_off": series.is_off,
        "file": "-".join(filter(None, (NAME, series.file_part, level.name))) + ".json",
    }


def _completes(prompts: Prompts) -> bool:
    """Whether prompts go without a chat template."""
    return isinstance(prompts, SamplePrompts) and not prompts.samples[0].messages
