"""Bench: every sample answered under every setting in turn, so that all meet the same machine."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.errors import ContextLengthExceeded
from specdec.evals.acceptance.answer import Answer, Reply
from specdec.evals.acceptance.asker import Asker, Question
from specdec.evals.acceptance.setting import Setting, in_turn
from specdec.evals.data.sample import Sample
from specdec.evals.report.journal import Journal
from specdec.evals.report.progress import Advance, progress


@dataclass(frozen=True)
class Found:
    """What a run brought: all answers, the plain ones as recorded samples, and skipped turns.

    `recorded` are of the first temperature.
    """

    answers: Sequence[Answer]
    recorded: Sequence[Mapping[str, Any]]
    num_skipped: int


def measure(
    asker: Asker,
    samples: Sequence[Sample],
    journal: Journal,
    *,
    max_tokens: int,
    num_turns: int | None = None,
) -> Found:
    """Ask everything that the journal does not have yet; `num_turns` bounds those of a sample.

    Later turns come after the plain answers to the earlier ones. A turn whose prompt leaves no
    room for an answer is skipped under all settings of its temperature, and those after it.
    """
    open_samples = [
        (number, sample) for number, sample in enumerate(samples) if sample.sample_id not in journal
    ]
    turns = {sample.sample_id: _turns(sample, num_turns) for sample in samples}
    total = sum(turns[sample.sample_id] for _, sample in open_samples)
    with progress(total * len(asker.settings)) as advance:
        for number, sample in open_samples:
            bench = _SampleBench(asker, sample, number, max_tokens)
            journal.add(sample.sample_id, bench.run(turns[sample.sample_id], advance))
    return _found([journal[sample.sample_id] for sample in samples])


class _SampleBench:
    """One sample under all settings, turn by turn."""

    def __init__(self, asker: Asker, sample: Sample, number: int, max_tokens: int) -> None:
        self._asker, self._sample, self._max_tokens = asker, sample, max_tokens
        self._order = in_turn(asker.settings, number)
        temperatures = dict.fromkeys(setting.temperature for setting in asker.settings)
        self._said: dict[float, tuple[str, ...]] = dict.fromkeys(temperatures, ())

    def run(self, num_turns: int, advance: Advance) -> dict[str, Any]:
        """The record of a journal."""
        answers: list[Answer] = []
        recorded: list[dict[str, Any]] = []
        num_skipped = 0
        first = self._asker.settings[0]
        for turn in range(num_turns):
            replies: dict[Setting, Reply] = {}
            for setting in self._order:
                advance(self._sample.task)
                if setting.temperature not in self._said:
                    continue
                try:
                    replies[setting] = self._ask(setting, replies)
                except ContextLengthExceeded:
                    num_skipped += num_turns - turn
                    del self._said[setting.temperature]
            answers += self._answers(replies, turn)
            if first in replies:
                question = self._question(first.temperature)
                said = self._asker.recorded(question, replies[first])
                recorded.append({**question.head, **said})
            for setting, reply in replies.items():
                if setting is self._first_of(setting.temperature):
                    self._said[setting.temperature] += (reply.text,)
        return {
            "answers": [answer.as_json() for answer in answers],
            "recorded": recorded,
            "num_skipped": num_skipped,
        }

    def _ask(self, setting: Setting, replies: Mapping[Setting, Reply]) -> Reply:
        plain = replies.get(self._first_of(setting.temperature))
        return self._asker.ask(self._question(setting.temperature), setting, plain)

    def _question(self, temperature: float) -> Question:
        said = self._said[temperature]
        # Of the sample alone: the same in a run over others, too.
        seed = zlib.crc32(f"{self._sample.sample_id} {len(said)}".encode())
        return Question(self._sample, said, seed, self._max_tokens)

    def _first_of(self, temperature: float) -> Setting:
        """Plain decoding at this temperature, or a server's only setting."""
        return next(item for item in self._asker.settings if item.temperature == temperature)

    def _answers(self, replies: Mapping[Setting, Reply], turn: int) -> Iterator[Answer]:
        for setting in self._asker.settings:
            if setting in replies:
                first = self._first_of(setting.temperature)
                is_equal = replies[setting].equals(replies[first]) if first.is_plain else None
                sample = self._sample
                yield Answer(
                    sample.sample_id,
                    sample.task,
                    turn,
                    setting.name,
                    is_equal,
                    replies[setting].measured,
                )


def _turns(sample: Sample, limit: int | None) -> int:
    return min(sample.num_turns, limit or sample.num_turns)


def _found(records: Sequence[Mapping[str, Any]]) -> Found:
    return Found(
        [Answer.from_json(answer) for record in records for answer in record["answers"]],
        [line for record in records for line in record["recorded"]],
        sum(record["num_skipped"] for record in records),
    )
