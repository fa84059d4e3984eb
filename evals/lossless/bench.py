"""Bench: the same questions with and without speculation, and where their answers part.

Plain answers come first, one at a time. Then each setting answers all questions, in an order that
mixes tasks, temperatures and seeds, so many at a time. Later turns build on the plain answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from specdec.errors import ContextLengthExceeded
from specdec.evals.acceptance.edited import with_edits
from specdec.evals.data.sample import Sample
from specdec.evals.lossless.answer import Answer
from specdec.evals.lossless.comparison import Comparison, Divergence
from specdec.evals.lossless.question import Asked, Question, seeds_of
from specdec.evals.lossless.respondent import PLAIN, Respondent, check_fits, does_not_fit
from specdec.evals.report.journal import Journal
from specdec.evals.report.progress import progress

SYNTHETIC = "synthetic"  # the drafter that has to know the whole answer

Item = TypeVar("Item")


@dataclass(frozen=True)
class LosslessSettings:
    """What is asked. `seeds` are the answers to each sampled turn; greedy ones need no more.

    `tie_margin` is the most that rounding can change the difference of two logits by.
    """

    samples: Sequence[Sample]
    settings: Sequence[str]
    temperatures: Sequence[float]
    tie_margin: float
    seeds: int = 2
    max_tokens: int = 128
    concurrency: int = 4
    num_turns: int | None = None  # most turns of a sample


def compare_all(
    settings: LosslessSettings, respondent: Respondent, journal: Journal
) -> list[Comparison]:
    """Ask everything that the journal does not have, and compare. Raises SpecdecError."""
    check_fits(respondent, _first_turns(settings))
    runner = _Runner(settings, respondent, journal)
    with progress(runner.most_answers) as advance:
        plain = runner.plain(advance)
        answers = [
            (setting, question, answer)
            for setting in settings.settings
            for question, answer in runner.others(setting, plain, advance)
        ]
    return [
        Comparison(
            setting,
            question,
            plain[question],
            answer,
            Divergence.between(question, plain[question], answer, respondent, settings.tie_margin),
        )
        for setting, question, answer in answers
    ]


def num_turns(settings: LosslessSettings) -> int:
    """Turns of all conversations; those that the context has no room for are not asked.

    Example: `num_turns(settings) - len(compare_all(settings, ...)) // len(settings.settings)`.
    """
    return sum(_num_turns(settings, question) for question in _first_turns(settings))


class _Runner:
    """Answers by question, from the journal or asked for now."""

    def __init__(
        self, settings: LosslessSettings, respondent: Respondent, journal: Journal
    ) -> None:
        self._settings = settings
        self._respondent = respondent
        self._journal = journal

    @property
    def most_answers(self) -> int:
        return num_turns(self._settings) * (1 + len(self._settings.settings))

    def plain(self, advance: Callable[[str], None]) -> dict[Question, Answer]:
        """One at a time, turn after turn, until one has no room in the context."""
        found: dict[Question, Answer] = {}
        for first in _first_turns(self._settings):
            answers: tuple[str, ...] = ()
            for turn in range(_num_turns(self._settings, first)):
                question = _turn(first, turn, answers)
                if not self._respondent.fits(question):
                    break
                try:
                    found |= self._ask(PLAIN, [Asked(question)], 1, advance)
                except ContextLengthExceeded:  # a server's own word
                    if turn == 0:
                        raise does_not_fit(question) from None
                    break
                answers += (found[question].text,)
        return found

    def others(
        self, setting: str, plain: dict[Question, Answer], advance: Callable[[str], None]
    ) -> Iterator[tuple[Question, Answer]]:
        """By a setting, mixed; in the order of the questions."""
        asked = [_predicted(question, answer, setting) for question, answer in plain.items()]
        random.Random(0).shuffle(asked)
        found = self._ask(setting, asked, self._settings.concurrency, advance)
        yield from ((question, found[question]) for question in plain)

    def _ask(
        self, setting: str, asked: Sequence[Asked], concurrency: int, advance: Callable[[str], None]
    ) -> dict[Question, Answer]:
        journal, found = self._journal, {}

        def begun(question: Question) -> None:
            advance(f"{setting}, {question.sample.task}")

        def done(question: Question, answer: Answer) -> None:
            journal.add(f"{setting}, {question.key}", answer.as_json())
            found[question] = answer

        for item in asked:
            key = f"{setting}, {item.question.key}"
            if key in journal:
                begun(item.question)
                found[item.question] = Answer.from_json(journal[key])
        missing = [item for item in asked if item.question not in found]
        if missing:
            self._respondent.ask(setting, missing, concurrency, begun, done)
        return found


def _first_turns(settings: LosslessSettings) -> Iterator[Question]:
    for number, sample in enumerate(settings.samples):
        for temperature in settings.temperatures:
            for seed in seeds_of(sample, settings.seeds if temperature else 1):
                yield Question(number, sample, 0, temperature, seed, settings.max_tokens)


def _num_turns(settings: LosslessSettings, question: Question) -> int:
    num_turns = question.sample.num_turns
    return min(num_turns, settings.num_turns or num_turns)


def _turn(first: Question, turn: int, answers: tuple[str, ...]) -> Question:
    return Question(
        first.number, first.sample, turn, first.temperature, first.seed, first.max_tokens, answers
    )


def _predicted(question: Question, plain: Answer, setting: str) -> Asked:
    """With the plain answer as the text to expect, three places of it edited."""
    ids = plain.token_ids or ()
    if SYNTHETIC in setting:
        return Asked(question, ids, plain.text)
    text = "".join(edited(plain.text, question.number))
    return Asked(question, edited(ids, question.number), text)


def edited(items: Sequence[Item], seed: int) -> tuple[Item, ...]:
    """The items with three places edited (`with_edits`), by others of them.

    Example: `"".join(edited("return total", seed=0))`.
    """
    if not items:
        return ()
    return tuple(items[index] for index in with_edits(range(len(items)), seed, len(items)))
