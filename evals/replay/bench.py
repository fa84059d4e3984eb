"""Bench: every recording replayed under every setting, in order, as fast as drafters draft."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.config import EngineConfig
from specdec.errors import SpecdecError
from specdec.evals.acceptance.answer import Answer, Measured
from specdec.evals.acceptance.setting import Setting
from specdec.evals.acceptance.step_counts import StepCounts
from specdec.evals.replay.engine import ReplayEngine
from specdec.evals.replay.recording import Recording
from specdec.evals.replay.target import load_drafter
from specdec.evals.report.journal import Journal
from specdec.evals.report.progress import Advance, progress
from specdec.loading import LoadedModel
from specdec.request import Request
from specdec.step_cost import StepCost
from specdec.step_record import StepRecord


@dataclass(frozen=True)
class Replayed:
    """The answers of one setting; `replay_s` is what it took to replay them, drafting included."""

    answers: tuple[Answer, ...]
    replay_s: float

    def as_json(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        answers = [answer.as_json() for answer in self.answers]
        return {"answers": answers, "replay_s": self.replay_s}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Replayed:
        """Example: `Replayed.from_json(replayed.as_json()) == replayed`."""
        return cls(tuple(map(Answer.from_json, found["answers"])), found["replay_s"])


def replay_all(
    config: EngineConfig,
    loaded: LoadedModel,
    settings: Sequence[Setting],
    recordings: Sequence[Recording],
    journal: Journal,
    cost: StepCost | None = None,
) -> dict[Setting, Replayed]:
    """Replay what the journal does not have yet; with a `cost`, steps have predicted times.

    Each setting begins with drafters as they were loaded, and meets the recordings in order: what a
    drafter remembers of one request is there for the next, and not for another setting.
    """
    open_settings = [setting for setting in settings if setting.name not in journal]
    with progress(len(open_settings) * len(recordings)) as advance:
        for setting in open_settings:
            found = _replay(config, loaded, setting, recordings, cost, advance)
            journal.add(setting.name, found.as_json())
    return {setting: Replayed.from_json(journal[setting.name]) for setting in settings}


def _replay(
    config: EngineConfig,
    loaded: LoadedModel,
    setting: Setting,
    recordings: Sequence[Recording],
    cost: StepCost | None,
    advance: Advance,
) -> Replayed:
    node_budget = config.node_budget if setting.node_budget is None else setting.node_budget
    own = replace(config, drafter=setting.drafter, node_budget=node_budget, prefix_cache=False)
    engine = ReplayEngine(own, loaded, load_drafter(loaded, own))
    answers: list[Answer] = []
    replay_s = 0.0
    for recording in recordings:
        advance(f"{setting.name}: {recording.task}")
        request = recording.request(setting, engine.vocab_size)
        before = sum(engine.drafter.seconds.values())
        started = time.perf_counter()
        steps = engine.replay(request, recording.output_ids)
        replay_s += time.perf_counter() - started
        if request.stats.disabled_drafters:
            names = ", ".join(request.stats.disabled_drafters)
            raise SpecdecError(
                f"{recording.answer_id}: the drafter {names} failed; the log says why"
            )
        draft_s = sum(engine.drafter.seconds.values()) - before
        decode_s = 0.0 if cost is None else sum(_predicted_s(request, steps, draft_s, cost))
        answers.append(_answer(setting, recording, request, steps, draft_s, decode_s))
    return Replayed(tuple(answers), replay_s)


def _predicted_s(
    request: Request, steps: Sequence[StepRecord], draft_s: float, cost: StepCost
) -> Iterator[float]:
    """Seconds of each step but the first, which belongs to the prompt: forward and drafting."""
    context = len(request.prompt_ids) + steps[0].num_tokens
    for step in steps[1:]:
        num_rows = 1 + sum(step.verified)
        yield float(cost.forward_s(1, context, num_rows)[num_rows]) + draft_s / len(steps)
        context += step.num_tokens


def _answer(
    setting: Setting,
    recording: Recording,
    request: Request,
    steps: Sequence[StepRecord],
    draft_s: float,
    decode_s: float,
) -> Answer:
    reason = str(request.finish_reason)
    counts = StepCounts.of(steps, reason, request.stats.drafted_by_source)
    return Answer(
        recording.sample_id,
        recording.task,
        recording.turn,
        setting.name,
        None,
        Measured(
            num_prompt=len(request.prompt_ids),
            num_output=len(request.output),
            num_first=steps[0].num_tokens,
            prefill_s=0.0,
            decode_s=decode_s,
            draft_s=draft_s,
            finish_reason=reason,
            counts=counts,
        ),
    )
