"""SyntheticDrafter: right as often as it is told to be, so that what is measured can be checked."""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

from specdec.drafting import DraftContext, Drafter
from specdec.errors import UsageError
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import ROOT_SOURCE, DraftTree

_USE = "synthetic needs a share per position, none above the one before: synthetic=0.8:0.6:0.4"


class SyntheticDrafter(Drafter):
    """Guesses chains of which position i is accepted in a share `rates[i]` of the steps.

    It has to know the answer: the request's predicted text, token by token, up to the first token
    that is another. Requests without one, and positions behind its end, get no guesses. The output
    stays the target's own. Tokens per step are 1 + sum(rates).

    Example: `--drafter synthetic=0.8:0.6:0.4`, on requests with the answer as `prediction`.
    """

    name = "synthetic"

    def __init__(self, rates: Sequence[float], vocab_size: int) -> None:
        self._rates = tuple(rates)
        self._scores = tuple(
            rate / before if before else 0.0 for before, rate in pairwise((1.0, *rates))
        )
        self._vocab_size = vocab_size

    @classmethod
    def load(cls, context: DraftContext) -> Self:
        """See Drafter."""
        try:
            rates = [float(rate) for rate in (context.checkpoint or "").split(":")]
        except ValueError:
            raise UsageError(_USE) from None
        if rates != sorted(rates, reverse=True) or not all(0 <= rate <= 1 for rate in rates):
            raise UsageError(_USE)
        return cls(rates, context.target.model.config.vocab_size)

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """See Drafter."""
        return [self._chain(step) for step in steps]

    def _chain(self, step: DecodeStep) -> DraftTree:
        request = step.request
        output, answer = request.output_ids, request.prediction_ids
        longest = min(step.node_budget, step.max_depth, len(self._rates))
        coming = answer[len(output) : len(output) + longest]
        if not coming or tuple(output) != tuple(answer[: len(output)]):
            return DraftTree.root_only(step.root)
        coin = _coin(request)
        num_right = sum(coin < rate for rate in self._rates[: len(coming)])
        right, wrong = coming[:num_right], coming[num_right:]
        tokens = (*right, *((token + 1) % self._vocab_size for token in wrong))
        size = len(tokens)
        return DraftTree(
            (step.root, *tokens),
            tuple(range(-1, size)),
            (1.0, *self._scores[:size]),
            ((ROOT_SOURCE,), *[(self.name,)] * size),
        )


def _coin(request: Request) -> float:
    """In [0, 1), one for all positions of a step: the share of steps that reach each is its rate.

    The prompt is in it: requests of one seed, as measurements have them, differ in their coins.
    """
    prompt = zlib.crc32(array("q", request.prompt_ids).tobytes())
    return random.Random(f"{request.seed} {prompt} {request.num_tokens}").random()
