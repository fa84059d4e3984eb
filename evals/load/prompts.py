"""Prompts: what load consists of, as bodies of requests that a seed decides."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.evals.data.sample import Sample
from specdec.evals.load.lengths import Lengths

CHAT, COMPLETION = "/chat/completions", "/completions"
# Common words that most tokenizers have whole, so that a prompt has about as many tokens as words.
_TEXT = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea body information back parent face level
office door health person art war history party result change morning reason research girl guy
moment air teacher force education food road light paper market music voice field river table
window garden winter summer letter island village engine
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Ask:
    """One request: where below /v1 it goes and its body, less the model's name."""

    route: str
    body: Mapping[str, Any]


class Prompts(Protocol):
    """Gives the index-th request of a level; the same for the same seed, level and index."""

    def ask(self, level: str, index: int) -> Ask:
        """What is sent as the index-th request, counted from 0."""
        ...

    def visit(self, index: int) -> int:
        """How many times the same prompt was sent before, in this level."""
        ...


@dataclass(frozen=True)
class SyntheticPrompts:
    """Words drawn at random after `shared_prefix` words that all requests have in common.

    Lengths are in words; how many tokens they are is for the server to say. Answers go on to
    their drawn length where the server takes `ignore_eos`.

    Example: `SyntheticPrompts(Lengths(100, 400), Lengths(64, 64), seed=0).ask("1", 0)`.
    """

    prompt_lengths: Lengths
    output_lengths: Lengths
    seed: int
    shared_prefix: int = 0

    def ask(self, level: str, index: int) -> Ask:
        """See Prompts."""
        shared = random.Random(f"{self.seed} shared").choices(WORDS, k=self.shared_prefix)
        rng = random.Random(f"{self.seed} {level} {index}")
        num_words, num_tokens = self.prompt_lengths.draw(rng), self.output_lengths.draw(rng)
        text = " ".join([*shared, *rng.choices(WORDS, k=num_words)])
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": num_tokens,
            "ignore_eos": True,
        }
        return Ask(CHAT, body)

    def visit(self, index: int) -> int:
        """See Prompts: no prompt comes twice."""
        return 0


@dataclass(frozen=True)
class SamplePrompts:
    """Samples in turn, over and over; each answer ends by itself or at its drawn length.

    Only the first turn of a conversation is asked.
    """

    samples: Sequence[Sample]
    output_lengths: Lengths
    seed: int

    def ask(self, level: str, index: int) -> Ask:
        """See Prompts."""
        sample = self.samples[index % len(self.samples)]
        rng = random.Random(f"{self.seed} {level} {index}")
        more: dict[str, Any] = {"max_tokens": self.output_lengths.draw(rng)}
        if sample.prompt_ids is not None:
            return Ask(COMPLETION, {"prompt": list(sample.prompt_ids), **more})
        if sample.text is not None:
            return Ask(COMPLETION, {"prompt": sample.text, **more})
        return Ask(CHAT, {"messages": sample.chat(), **more})

    def visit(self, index: int) -> int:
        """See Prompts."""
        return index // len(self.samples)
