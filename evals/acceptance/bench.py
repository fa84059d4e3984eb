"""Acceptance: tokens per step, draft cost and speed of each drafter, by task, in one run.

Each sample is answered by every drafter in turn, and without one, so that all of them meet the
same state of the machine; the answers must be equal token by token. Each request comes with a
prediction for the drafter of that name: the plain answer with three places edited (edited.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.composite import CompositeDrafter
from specdec.config import EngineConfig
from specdec.drafting import DraftContext
from specdec.engine import Engine
from specdec.evals.acceptance.edited import with_edits
from specdec.evals.data.sample import Sample
from specdec.evals.report.progress import progress
from specdec.evals.report.tables import table
from specdec.generation import Generation, generate
from specdec.params import SamplingParams

PLAIN = "none"


@dataclass(frozen=True)
class AcceptanceSettings:
    """What to run; without `uses_noise` drafters rank as if all requests were greedy."""

    config: EngineConfig
    samples: Sequence[Sample]
    drafters: Sequence[str]
    temperature: float = 0.0
    max_tokens: int = 128
    uses_noise: bool = True


@dataclass
class Tally:
    """Sums over the answers of one drafter to one task. Times in seconds, of decode steps only."""

    num_answers: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    num_drafted: int = 0
    num_timed_tokens: int = 0
    decode_s: float = 0.0
    draft_s: float = 0.0
    num_unequal: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)

    def add(self, answer: Generation, draft_s: float, is_equal: bool) -> None:
        """Take in one answer."""
        stats = answer.stats
        self.num_answers += 1
        self.num_tokens += len(answer.tokens)
        self.num_steps += stats.num_steps
        self.num_accepted += stats.num_accepted
        self.num_drafted += stats.num_draft_tokens
        self.num_timed_tokens += len(answer.tokens) - answer.num_first
        self.decode_s += answer.total_s - answer.ttft_s
        self.draft_s += draft_s
        self.num_unequal += not is_equal
        for source, count in stats.accepted_by_source.items():
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + count

    def merge(self, other: Tally) -> None:
        """Take in another tally."""
        for name, value in dataclasses.asdict(other).items():
            if name == "accepted_by_source":
                for source, count in value.items():
                    known = self.accepted_by_source
                    known[source] = known.get(source, 0) + count
            else:
                setattr(self, name, getattr(self, name) + value)

    def as_json(self, plain: Tally) -> dict[str, Any]:
        """Figures for a report; `speed` is decode tokens per second over plain decoding's."""
        steps = max(1, self.num_steps)
        return {
            "answers": self.num_answers,
            "tokens": self.num_tokens,
            "tokens_per_step": round(1 + self.num_accepted / steps, 3),
            "drafted_per_step": round(self.num_drafted / steps, 2),
            "draft_ms_per_step": round(1e3 * self.draft_s / steps, 3),
            "step_ms": round(1e3 * self.decode_s / steps, 3),
            "speed": round(self._per_second / plain._per_second, 3) if plain.decode_s else None,
            "unequal_answers": self.num_unequal,
            "accepted_by_source": dict(sorted(self.accepted_by_source.items())),
        }

    @property
    def _per_second(self) -> float:
        return self.num_timed_tokens / self.decode_s if self.decode_s else 0.0


def evaluate(settings: AcceptanceSettings) -> dict[str, Any]:
    """Run all samples with all drafters; figures by drafter and task, and over all tasks."""
    engine = Engine(dataclasses.replace(settings.config, drafter=PLAIN, control="fixed"))
    drafters: dict[str, CompositeDrafter] = {}
    for name in (PLAIN, *settings.drafters):
        config = dataclasses.replace(settings.config, drafter=name)
        drafters[name] = CompositeDrafter.load(DraftContext(engine.loaded, config))
        for drafter in drafters[name].drafters:
            drafter.uses_noise = settings.uses_noise
    tallies: dict[str, dict[str, Tally]] = {name: {} for name in drafters}
    with progress(len(settings.samples)) as advance:
        for number, sample in enumerate(settings.samples):
            advance(sample.task)
            _ask(engine, drafters, sample, number, settings, tallies)
    return _report(settings, tallies)


def _ask(
    engine: Engine,
    drafters: Mapping[str, CompositeDrafter],
    sample: Sample,
    number: int,
    settings: AcceptanceSettings,
    tallies: Mapping[str, dict[str, Tally]],
) -> None:
    """One sample to every drafter, plain decoding first; its prompt is computed once."""
    expected: tuple[int, ...] | None = None
    predicted: tuple[int, ...] = ()
    for name, drafter in drafters.items():
        engine.drafter = drafter
        before = sum(drafter.seconds.values())
        answer = _answer(engine, sample, settings, number, predicted)
        if expected is None:
            expected = answer.token_ids
            predicted = with_edits(expected, number, engine.vocab_size)
        tally = tallies[name].setdefault(sample.task, Tally())
        drafting = sum(drafter.seconds.values()) - before
        tally.add(answer, drafting, answer.token_ids == expected)


def _answer(
    engine: Engine,
    sample: Sample,
    settings: AcceptanceSettings,
    seed: int,
    predicted: Sequence[int],
) -> Generation:
    params = SamplingParams(
        max_tokens=settings.max_tokens, temperature=settings.temperature, seed=seed
    )
    prompt_ids = sample.encode(engine.tokenizer)
    return generate(engine, prompt_ids, params, prediction_ids=predicted)


def _report(
    settings: AcceptanceSettings, tallies: Mapping[str, Mapping[str, Tally]]
) -> dict[str, Any]:
    plain = tallies[PLAIN]
    by_drafter = {}
    for name, by_task in tallies.items():
        total, plain_total = Tally(), Tally()
        for task, tally in by_task.items():
            total.merge(tally)
            plain_total.merge(plain[task])
        by_drafter[name] = {
            "tasks": {task: tally.as_json(plain[task]) for task, tally in by_task.items()},
            "all": total.as_json(plain_total),
        }
    return {
        "model": settings.config.model,
        "weights": settings.config.weights,
        "node_budget": settings.config.node_budget,
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
        "uses_noise": settings.uses_noise,
        "drafters": by_drafter,
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Tokens per step by task, and over all tasks draft cost and speed, as README has them."""
    drafters = report["drafters"]
    tasks = list(drafters[PLAIN]["tasks"])
    head = ["`--drafter`", *tasks, "nodes", "draft ms", "step ms", "speed"]
    lines = [head, ["---"] * len(head)]
    for name, found in drafters.items():
        total = found["all"]
        lines.append(
            [
                name,
                *(f"{found['tasks'][task]['tokens_per_step']:.2f}" for task in tasks),
                f"{total['drafted_per_step']:.1f}",
                f"{total['draft_ms_per_step']:.2f}",
                f"{total['step_ms']:.1f}",
                f"{total['speed']:.2f}x" + (" (loses)" if total["speed"] < 1 else ""),
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def render(report: Mapping[str, Any]) -> str:
    """Tokens per step by task, then what a step costs and what is gained."""
    return "\n".join(_lines(report))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    drafters = report["drafters"]
    tasks = list(drafters[PLAIN]["tasks"])
    yield (
        f"{report['model']}, node budget {report['node_budget']}, "
        f"temperature {report['temperature']:g}, up to {report['max_tokens']} tokens; "
        "tokens per step:"
    )
    yield from table(
        ["drafter", *(task.replace(" ", "-") for task in tasks), "all"],
        [
            (
                name,
                *(f"{found['tasks'][task]['tokens_per_step']:.2f}" for task in tasks),
                f"{found['all']['tokens_per_step']:.2f}",
            )
            for name, found in drafters.items()
            if name != PLAIN
        ],
    )
    yield ""
    yield "over all tasks; speed is tokens per second over those of plain decoding:"
    yield from table(
        ["drafter", "nodes/step", "draft-ms/step", "step-ms", "speed", "answers"],
        [
            (
                name,
                f"{found['all']['drafted_per_step']:.1f}",
                f"{found['all']['draft_ms_per_step']:.2f}",
                f"{found['all']['step_ms']:.2f}",
                f"{found['all']['speed']:.2f}" + (" loses" if found["all"]["speed"] < 1 else ""),
                "equal" if not found["all"]["unequal_answers"] else "DIFFER",
            )
            for name, found in drafters.items()
        ],
    )
