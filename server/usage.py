"""Usage: token counts of an answer, and how its drafts fared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from specdec.metrics import SpeculationStats
from specdec.server.choice import Choice


class CachedTokens(Struct):
    cached_tokens: int


class PredictionTokens(Struct):
    """What became of the nodes that were drafted from the client's prediction.

    A rejected one was drafted and not accepted, wherever in its tree it stood; a place of the text
    can be drafted in several steps. Rejected tokens are not among `completion_tokens`.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> PredictionTokens:
        """Add up finished choices."""
        num_drafted, num_accepted = (
            sum(choice.stats[name].get("prediction", 0) for choice in choices if choice.stats)
            for name in ("drafted_by_source", "accepted_by_source")
        )
        return cls(num_accepted, num_drafted - num_accepted)


class Usage(Struct, kw_only=True):
    """Token counts of a whole answer; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictionTokens | UnsetType = UNSET

    @classmethod
    def of(
        cls,
        num_prompt: int,
        choices: Sequence[Choice],
        num_choices: int,
        *,
        has_prediction: bool = False,
        num_output: int | None = None,
    ) -> Usage:
        """Add up choices, `num_choices` to a prompt; only a prompt's first could find it cached.

        `num_output` tokens are said to be there where not all of them have been sent.
        """
        if num_output is None:
            num_output = sum(choice.num_tokens for choice in choices)
        num_cached = sum(choice.num_prefix_hit for choice in choices[::num_choices])
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=CachedTokens(num_cached),
            completion_tokens_details=PredictionTokens.of(choices) if has_prediction else UNSET,
        )


class Metrics(Struct):
    """Acceptance figures at the response's root, of all its choices together."""

    speculative_decoding: Mapping[str, Any]

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> Metrics:
        """Add up finished choices; see `SpeculationStats.as_wire`."""
        total = SpeculationStats()
        for choice in choices:
            if choice.stats is not None:
                total.add(SpeculationStats.from_wire(choice.stats))
        return cls(total.as_wire())
