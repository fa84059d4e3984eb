"""Question: one answer that is asked for, with all that decides it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.errors import UsageError
from specdec.evals.data.sample import Sample


@dataclass(frozen=True, eq=False)
class Question:
    """A turn of a sample at a temperature, with a seed; `number` is the sample's in the run.

    `answers` are what the turns before it got. Two questions are never equal: each is asked once.

    Example: `Question(0, sample, 0, 1.0, seed=7, max_tokens=64).key`.
    """

    number: int
    sample: Sample
    turn: int
    temperature: float
    seed: int
    max_tokens: int
    answers: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Its name among the questions of a run."""
        return f"{self.number} turn {self.turn} temperature {self.temperature!r} seed {self.seed}"

    @property
    def name(self) -> str:
        """How a reader finds it in the data. Example: `81, turn 2, seed 5`."""
        seed = f", seed {self.seed}" if self.temperature else ""
        return f"{self.sample.sample_id}, turn {self.turn + 1}{seed}"


@dataclass(frozen=True)
class Asked:
    """A question and the text that its asker says to expect, as token ids and as it reads."""

    question: Question
    predicted_ids: tuple[int, ...] = ()
    predicted_text: str = ""


def seeds_of(sample: Sample, count: int) -> range:
    """Seeds of a sample, the same in every run and with any other samples beside it."""
    first = zlib.crc32(sample.sample_id.encode())
    return range(first, first + count)


def check_temperatures(text: str) -> tuple[float, ...]:
    """The numbers of a comma-separated list; raises UsageError.

    Example: `check_temperatures("0,0.7") == (0.0, 0.7)`.
    """
    try:
        found = tuple(dict.fromkeys(float(item) for item in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 <= value <= 100 for value in found):
        raise UsageError(
            f"--temperature takes numbers from 0 to 100 with commas between, not {text!r}"
        )
    return found


def check_names(names: Sequence[str], option: str) -> None:
    """Raises UsageError for a name that is given twice."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{option} {name} is given twice")
