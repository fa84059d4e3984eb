"""Workload: the requests of one kind of work, which a measurement makes again and again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.evals.data.formats import read_samples
from specdec.evals.data.questions import code_edits
from specdec.evals.data.sample import first_of_each_task
from specdec.params import SamplingParams

MAX_PROMPT = 400  # tokens; longer ones are left out: reading them would be most of a run
NUM_PROMPTS = 24  # of the code edits and the random ones
_PER_TASK = 8  # questions of a file
_RANDOM_LENS = range(16, 129)

# One turn each: facts, explanations, stories, lists, letters, sums, rewriting, translation.
CHATS = (
    "Why does the sea look blue on some days and grey on others?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a ten-year-old how a refrigerator keeps food cold.",
    "Give me five tips for learning to cook without a recipe.",
    "Write a polite email to my landlord about a tap that drips.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Show each step.",
    "What is the difference between weather and climate?",
    "Write a poem of eight lines about the first snow of the year.",
    "Compare working at home with working in an office.",
    "List the planets of the solar system with one fact about each of them.",
    "How do I change the tyre of a bicycle?",
    "Rewrite this so that it is friendlier: Your report is late again. Send it today.",
    "Translate into French: The library is closed on Sundays, but you can return books.",
    "Plan a weekend in a small town by the sea for a family with two children.",
    "Write a Python function that returns the second largest number of a list.",
    "Who invented the printing press, and what did it change?",
    "I sleep badly before exams. What can I do about it?",
    "Summarize in two sentences: Bees visit flowers for nectar. As they go from one to the next "
    "they carry pollen with them. Many fruits that we eat would not grow without this work. In "
    "some regions there are fewer bees every year, and farmers rent hives by the week.",
    "Write a dialogue between a cat and a dog who share a house.",
    "What are the advantages and disadvantages of electric cars?",
    "Describe how bread is made, from the grain to the loaf.",
    "A shop sells pens at 3 for 2 euros. What do 12 pens cost? Explain your answer.",
    "Suggest a name, a slogan and three rules for a neighbourhood running club.",
    "Why do we have leap years?",
)


@dataclass(frozen=True)
class Task:
    """One request to be made, the same each time; `prediction_ids` is the answer expected."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prediction_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorkloadSettings:
    """What tasks are made of: answers have at most `max_tokens`, chats may be a file's.

    Raises UsageError if the file of questions cannot be read.
    """

    max_tokens: int = 96
    questions: Path | None = None

    def __post_init__(self) -> None:
        if self.questions is not None:
            read_samples(self.questions)


def workload(kind: str, engine: Engine, settings: WorkloadSettings) -> tuple[Task, ...]:
    """The tasks of a kind of work, with the tokens of the engine's model.

    Left out are prompts of more than MAX_PROMPT tokens, or than the context holds with the
    answer. Raises UsageError for a kind that is not in KINDS, or if no prompt is left.

    Example: `workload("chat", engine, WorkloadSettings())[0].prompt_ids`.
    """
    check_kind(kind)
    longest = min(MAX_PROMPT, engine.max_model_len - settings.max_tokens)
    made = KINDS[kind](engine, settings)
    tasks = tuple(task for task in made if len(task.prompt_ids) <= longest)
    if not tasks:
        raise UsageError(f"no {kind} prompt is as short as {longest} tokens with this model")
    return tasks


def check_kind(kind: str) -> None:
    """Raise UsageError unless there is such a kind."""
    if kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}; choose from {', '.join(KINDS)}")


def _chat(engine: Engine, settings: WorkloadSettings) -> Iterator[Task]:
    """CHATS, or the first questions of each task of a file, up to their natural end."""
    params = SamplingParams(max_tokens=settings.max_tokens)
    if settings.questions is None:
        prompts = [engine.tokenizer.encode_chat([_user(text)]) for text in CHATS]
    else:
        samples = first_of_each_task(read_samples(settings.questions), _PER_TASK)
        prompts = [sample.encode(engine.tokenizer) for sample in samples]
    for prompt in prompts:
        yield Task(tuple(prompt), params)


def _code_edit(engine: Engine, settings: WorkloadSettings) -> Iterator[Task]:
    """Functions to be given back changed; every other one predicts its source, as editors do."""
    tokenizer = engine.tokenizer
    params = SamplingParams(max_tokens=settings.max_tokens)
    for number, question in enumerate(code_edits(NUM_PROMPTS)):
        text = question.messages[0]["content"]
        source = "" if number % 2 else text[text.index("```") :]
        prompt = question.encode(tokenizer)
        prediction = tokenizer.encode(source, add_special_tokens=False)
        yield Task(tuple(prompt), params, tuple(prediction))


def _random(engine: Engine, settings: WorkloadSettings) -> Iterator[Task]:
    """Random token ids, answered at temperature 1: nothing repeats, so drafts are of no use.

    Such answers have no natural end: an end token is one like any other.
    """
    rng = random.Random(0)
    for seed in range(NUM_PROMPTS):
        length = rng.choice(_RANDOM_LENS)
        yield Task(
            tuple(rng.randrange(engine.vocab_size) for _ in range(length)),
            SamplingParams(
                max_tokens=settings.max_tokens, temperature=1.0, seed=seed, ignore_eos=True
            ),
        )


def _user(text: str) -> Mapping[str, str]:
    return {"role": "user", "content": text}


Maker = Callable[[Engine, WorkloadSettings], Iterable[Task]]
KINDS: Mapping[str, Maker] = {"chat": _chat, "code-edit": _code_edit, "random": _random}
