"""Sample: one conversation to be answered, or one whose answer is recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from specdec.errors import UsageError
from specdec.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """What is asked, and of which task it is. `sample_id` is unique among the samples of a run.

    `messages` are a chat up to the first turn to be answered; `later_turns` are what the user says
    after each answer. Instead of messages there is `text`, a prompt without a chat template, or
    `prompt_ids`. A recorded answer is `output` or `output_ids`; `turn_of` is the sample of whose
    conversation it is a later turn, and `seed` what it was drawn with. `place` is the file and line
    that it was read from.
    """

    sample_id: str
    task: str
    messages: tuple[Message, ...] = ()
    later_turns: tuple[str, ...] = ()
    text: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    output: str | None = None
    output_ids: tuple[int, ...] | None = None
    turn_of: str | None = None
    seed: int | None = None
    place: str = field(default="", repr=False, compare=False)  # a digest does not depend on it

    def encode(self, tokenizer: Tokenizer, answers: Sequence[str] = ()) -> list[int]:
        """Token ids of the prompt after so many answers, one of which every turn got.

        Example: `sample.encode(tokenizer, answers=["Hello."])` is the prompt of the second turn.
        """
        if self.prompt_ids is not None:
            return list(self.prompt_ids)
        if self.text is not None:
            return tokenizer.encode(self.text)
        return tokenizer.encode_chat(self.chat(answers))

    def chat(self, answers: Sequence[str] = ()) -> list[Message]:
        """The messages after so many answers."""
        messages = list(self.messages)
        for answer, turn in zip(answers, self.later_turns, strict=False):
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": turn},
            ]
        return messages

    @property
    def num_turns(self) -> int:
        """How many answers are asked for."""
        return 1 + len(self.later_turns)

    def check_vocabulary(self, vocab_size: int, model: str) -> None:
        """Raises UsageError, with file and line, for a token id that the model does not have.

        Example: `Sample("a", "chat", prompt_ids=(9,)).check_vocabulary(9, "toy")` raises.
        """
        highest = max((*(self.prompt_ids or ()), *(self.output_ids or ())), default=0)
        if highest >= vocab_size:
            raise UsageError(
                f"{self.place or f'sample {self.sample_id!r}'} has token {highest}, and {model} "
                f"knows {vocab_size}: give the --model that it is of"
            )


def digest(samples: Sequence[Sample]) -> str:
    """Tells samples from others, for who goes on with an interrupted run.

    Example: `digest(samples) == digest(list(samples))`.
    """
    return sha256(repr(tuple(samples)).encode()).hexdigest()


def first_of_each_task(
    samples: Iterable[Sample], per_task: int | None = None, tasks: Sequence[str] = ()
) -> list[Sample]:
    """At most `per_task` samples of each task, in order; None takes all, no `tasks` are all tasks.

    Raises UsageError, naming the tasks there are, if one is unknown or nothing is left.
    """
    all_samples = list(samples)
    if not all_samples:
        raise UsageError("there is no sample in the data")
    known = list(dict.fromkeys(sample.task for sample in all_samples))
    for task in tasks:
        if task not in known:
            raise UsageError(f"no task {task!r} in the data; there are: {', '.join(known)}")
    counts = dict.fromkeys(known, 0)
    kept = []
    for sample in all_samples:
        counts[sample.task] += 1
        if (per_task is None or counts[sample.task] <= per_task) and sample.task in (
            tasks or known
        ):
            kept.append(sample)
    return kept
