"""Distribution: the first tokens of many draws with and without speculation, and their tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.errors import ContextLengthExceeded, SpecdecError
from specdec.evals.data.sample import Sample
from specdec.evals.lossless.answer import Answer
from specdec.evals.lossless.homogeneity import Draw, Homogeneity, holm
from specdec.evals.lossless.question import Asked, Question
from specdec.evals.lossless.respondent import PLAIN, Respondent, check_fits, does_not_fit
from specdec.evals.report.journal import Journal
from specdec.evals.report.progress import progress

NUM_POSITIONS = 3  # output tokens that are drawn and tested
LEVEL = 0.001  # of all tests together, after Holm's correction


@dataclass(frozen=True)
class DistributionSettings:
    """`draws` are of each side, with seeds of its own: equal seeds would not be two samples."""

    samples: Sequence[Sample]
    settings: Sequence[str]
    temperatures: Sequence[float]
    draws: int = 400
    concurrency: int = 16


@dataclass(frozen=True)
class Drawn:
    """All draws of one prompt at one temperature by one setting.

    `text` is what the most common of them reads as.
    """

    draws: tuple[Draw, ...]
    text: str
    num_steps: int
    num_accepted: int

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Drawn:
        """Of answers that have token ids."""
        draws = tuple(answer.token_ids or () for answer in answers)
        common = answers[draws.index(Counter(draws).most_common(1)[0][0])]
        return cls(
            draws,
            common.text,
            sum(answer.num_steps for answer in answers),
            sum(answer.num_accepted for answer in answers),
        )

    @property
    def most_common(self) -> Draw:
        return Counter(self.draws).most_common(1)[0][0]

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "draws": [list(draw) for draw in self.draws],
            "text": self.text,
            "num_steps": self.num_steps,
            "num_accepted": self.num_accepted,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Drawn:
        """Example: `Drawn.from_json(drawn.as_json()) == drawn`."""
        draws = tuple(tuple(draw) for draw in fields["draws"])
        return cls(draws, fields["text"], fields["num_steps"], fields["num_accepted"])


@dataclass(frozen=True)
class Tested:
    """One position of one prompt; `corrected` is its p-value after Holm's correction over all."""

    setting: str
    temperature: float
    sample: Sample
    position: int
    test: Homogeneity
    corrected: float

    @property
    def is_different(self) -> bool:
        return self.corrected < LEVEL


@dataclass(frozen=True)
class Found:
    """Tests, and per setting and temperature the decode steps and the accepted tokens."""

    tests: Sequence[Tested]
    counts: dict[tuple[str, float], tuple[int, int]]

    @property
    def is_lossless(self) -> bool:
        """Whether there were tests and none says otherwise."""
        return bool(self.tests) and not any(test.is_different for test in self.tests)


def compare_draws(
    settings: DistributionSettings, respondent: Respondent, journal: Journal
) -> Found:
    """Draw what the journal does not have, and test. Raises SpecdecError."""
    numbered = list(enumerate(settings.samples))
    check_fits(respondent, (Question(n, one, 0, 1.0, 0, NUM_POSITIONS) for n, one in numbered))
    counts: dict[tuple[str, float], tuple[int, int]] = {}
    raw: list[tuple[str, float, Sample, int, Homogeneity]] = []
    total = len(settings.samples) * len(settings.temperatures) * (1 + len(settings.settings))
    with progress(total) as advance:
        for number, sample in numbered:
            for temperature in settings.temperatures:
                asker = _Drawer(settings, respondent, journal, number, sample, temperature, advance)
                plain = asker.draw(PLAIN, range(settings.draws), None)
                seeds = range(settings.draws, 2 * settings.draws)
                for setting in settings.settings:
                    other = asker.draw(setting, seeds, plain)
                    key = setting, temperature
                    steps, accepted = counts.get(key, (0, 0))
                    counts[key] = steps + other.num_steps, accepted + other.num_accepted
                    raw += [
                        (setting, temperature, sample, position, test)
                        for position, test in _tests(plain, other)
                    ]
    corrected = holm([test.p_value for *_, test in raw])
    return Found([Tested(*one, value) for one, value in zip(raw, corrected, strict=True)], counts)


def _tests(plain: Drawn, other: Drawn) -> Iterator[tuple[int, Homogeneity]]:
    for position in range(NUM_POSITIONS):
        test = Homogeneity.of(plain.draws, other.draws, position)
        if test is not None:
            yield position, test


@dataclass(frozen=True)
class _Drawer:
    """Draws for one prompt at one temperature, from the journal or now."""

    settings: DistributionSettings
    respondent: Respondent
    journal: Journal
    number: int
    sample: Sample
    temperature: float
    advance: Callable[[str], None]

    def draw(self, setting: str, seeds: range, plain: Drawn | None) -> Drawn:
        """plain: what drafters may expect."""
        self.advance(f"{setting}, {self.sample.task}")
        key = f"{setting}, {self.number}, temperature {self.temperature!r}"
        if key not in self.journal:
            self.journal.add(key, self._draw(setting, seeds, plain).as_json())
        return Drawn.from_json(self.journal[key])

    def _draw(self, setting: str, seeds: range, plain: Drawn | None) -> Drawn:
        answers: dict[int, Answer] = {}
        asked = [
            Asked(
                Question(self.number, self.sample, 0, self.temperature, seed, NUM_POSITIONS),
                plain.most_common if plain else (),
                plain.text if plain else "",
            )
            for seed in seeds
        ]

        def done(question: Question, answer: Answer) -> None:
            if answer.token_ids is None:
                raise SpecdecError(
                    "the server gives no token ids, without which draws cannot be told apart"
                )
            answers[question.seed] = answer

        try:
            self.respondent.ask(setting, asked, self.settings.concurrency, lambda _: None, done)
        except ContextLengthExceeded:  # a server's own word
            raise does_not_fit(asked[0].question) from None
        return Drawn.of([answers[seed] for seed in seeds])
