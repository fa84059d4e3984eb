"""Run: one `specdec eval lossless`, checked before anything is loaded, up to its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig
from specdec.drafting import check_drafters
from specdec.errors import UsageError
from specdec.evals.data.sample import Sample, digest
from specdec.evals.lossless import distribution, render, render_distribution
from specdec.evals.lossless.bench import LosslessSettings, compare_all, num_turns
from specdec.evals.lossless.in_process import InProcess
from specdec.evals.lossless.margin import COARSE_TIE_MARGIN, default_tie_margin
from specdec.evals.lossless.respondent import Respondent
from specdec.evals.lossless.served import DEFAULT, ServedAnswers
from specdec.evals.report.journal import Journal
from specdec.evals.report.machine import origin
from specdec.evals.report.report import Report, ReportFolder


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of a run: in process with a `config`, or at a `url`.

    `deterministic` is whether equal bits are promised; a CPU of our own always promises them.

    Example: `Run(samples=samples, drafters=("ngram",), config=EngineConfig()).equality()`.
    """

    samples: Sequence[Sample]
    drafters: tuple[str, ...]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seeds: int = 2
    max_tokens: int = 128
    concurrency: int = 4
    num_turns: int | None = None
    tie_margin: float | None = None
    draws: int = 400
    config: EngineConfig | None = None
    url: str | None = None
    against: str | None = None
    api_key: str | None = None
    against_key: str | None = None
    model: str | None = None
    deterministic: bool = True
    out: Path | None = None

    def equality(self) -> Report:
        """Token by token. Raises UsageError for what cannot be compared so."""
        self._check_rule()
        folder = self._prepare(render.NAME)
        journal = self._journal(render.NAME)
        respondent = self._respondent(caches_prompts=False)
        tie_margin = self._tie_margin(respondent)
        settings = LosslessSettings(
            self.samples,
            self._settings,
            self.temperatures,
            tie_margin,
            self.seeds,
            self.max_tokens,
            self.concurrency,
            self.num_turns,
        )
        with journal:
            found = compare_all(settings, respondent, journal)
        on_cpu = self.config is not None and self.config.device.startswith("cpu")
        report = render.make_report(
            {
                **self._head(respondent),
                "temperatures": self.temperatures,
                "seeds": self.seeds,
                "max_tokens": self.max_tokens,
            },
            found,
            tie_margin=tie_margin,
            forgives_ties=not (self.deterministic or on_cpu),
            num_skipped=num_turns(settings) - len(found) // len(self._settings),
        )
        folder.write(report)
        journal.discard()
        return report

    def distribution(self) -> Report:
        """By chi-squared. Raises UsageError without a temperature above 0."""
        heats = tuple(heat for heat in self.temperatures if heat)
        if not heats:
            raise UsageError("--distribution needs a --temperature above 0: nothing is drawn at 0")
        folder = self._prepare(render_distribution.NAME)
        journal = self._journal(render_distribution.NAME)
        respondent = self._respondent(caches_prompts=True)
        settings = distribution.DistributionSettings(
            self.samples, self._settings, heats, self.draws, self.concurrency
        )
        with journal:
            found = distribution.compare_draws(settings, respondent, journal)
        report = render_distribution.make_report(
            {**self._head(respondent), "temperatures": heats}, found, self.draws
        )
        folder.write(report)
        journal.discard()
        return report

    @property
    def _settings(self) -> tuple[str, ...]:
        return self.drafters if self.url is None else (DEFAULT, *self.drafters)

    def _check_rule(self) -> None:
        rule = None if self.config is None else self.config.verification
        if rule == "typical":
            raise UsageError(
                "typical acceptance is lossy, so its answers are others; "
                "--distribution shows how far off they are"
            )
        if rule == "rejection" and any(self.temperatures):
            raise UsageError(
                "what rejection draws depends on the drafts, so sampled answers are others though "
                "their distribution is the same: test it by --distribution, or give --temperature 0"
            )

    def _prepare(self, name: str) -> ReportFolder:
        """Everything that can be wrong, before a model is loaded."""
        if self.url is None:
            for drafter in self.drafters:
                check_drafters(drafter)
        return ReportFolder(self.out, name)

    def _respondent(self, *, caches_prompts: bool) -> Respondent:
        if self.url is not None:
            return ServedAnswers(
                self.url,
                against=self.against,
                drafters=self.drafters,
                api_key=self.api_key,
                against_key=self.against_key,
                model=self.model,
            )
        assert self.config is not None, "a run is in process or at a URL"
        most = max(self.config.max_running, self.concurrency)
        return InProcess(
            replace(self.config, max_running=most),
            caches_prompts=caches_prompts,
            settings=self.drafters,
        )

    def _tie_margin(self, respondent: Respondent) -> float:
        if self.tie_margin is not None:
            return self.tie_margin
        if self.config is None or not isinstance(respondent, InProcess):
            return COARSE_TIE_MARGIN
        return default_tie_margin(respondent.loaded.model.precision, self.config.kv)

    def _journal(self, name: str) -> Journal:
        """Of what decides the answers."""
        decides = {
            "url": self.url,
            "against": self.against,
            "model": self.model,
            "config": None if self.config is None else asdict(self.config),
            "samples": digest(self.samples),
            "settings": self._settings,
            "temperatures": self.temperatures,
            "seeds": self.seeds,
            "max_tokens": self.max_tokens,
            "num_turns": self.num_turns,
            "draws": self.draws,
        }
        return Journal(self.out / f"{name}.part.jsonl" if self.out else None, decides)

    def _head(self, respondent: Respondent) -> Mapping[str, Any]:
        return {
            **origin(*(() if self.url is None else ("aiohttp",))),
            "served": respondent.facts(),
            "settings": self._settings,
            "concurrency": self.concurrency,
            "samples": [sample.sample_id for sample in self.samples],
        }


def default_drafters(model: str) -> tuple[str, ...]:
    """The engine's own default, one that looks for equal words, and heads where the model has some.

    Example: `default_drafters("smollm2-135m-instruct")` ends with "suffix,medusa".
    """
    from specdec.drafters.pretrained.lookup import is_pretrained

    names = (EngineConfig.drafter, "ngram")
    return (*names, "suffix,medusa") if is_pretrained(model, "medusa") else names
