"""SamplingParams: what a request asks of the sampler and of the stop rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.errors import InvalidRequest

MAX_LOGPROBS = 20
SEED_RANGE = 2**64
MAX_LOGIT_BIAS = 1e30  # far from fp32's largest value, so that no logit becomes infinite
MIN_TEMPERATURE = 1e-5  # below it fp32 logits divided by it may overflow; it is greedy in effect


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, validated on construction.

    `seed=None` means that the engine draws one. `top_k=0` and `top_p=1` switch truncation off.
    The order is: penalties, bias and bans, temperature, top-k, top-p, min-p (see sampling.py).

    Example: `SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=64)`.
    Raises InvalidRequest naming the parameter.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: frozenset[int] | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # in the text that stop strings are looked for in
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_range("max_tokens", 1, None)
        self._check_range("temperature", 0.0, 100.0)
        self._check_range("top_k", 0, None)
        self._check_range("top_p", 0.0, 1.0, open_low=True)
        self._check_range("min_p", 0.0, 1.0)
        self._check_range("presence_penalty", -2.0, 2.0)
        self._check_range("frequency_penalty", -2.0, 2.0)
        self._check_range("repetition_penalty", 0.0, 100.0, open_low=True)
        self._check_range("min_tokens", 0, None)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens must not exceed max_tokens", param="min_tokens")
        if self.seed is not None:
            self._check_range("seed", 0, SEED_RANGE - 1)
        if self.logprobs is not None:
            self._check_range("logprobs", 0, MAX_LOGPROBS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop strings must not be empty", param="stop")
        if any(not word for word in self.bad_words):
            raise InvalidRequest("bad_words must not hold an empty entry", param="bad_words")
        if any(not abs(bias) <= MAX_LOGIT_BIAS for bias in self.logit_bias.values()):
            raise InvalidRequest("logit_bias values must be finite numbers", param="logit_bias")

    @property
    def is_greedy(self) -> bool:
        """Whether the sampler takes the likeliest token, without noise."""
        return self.temperature < MIN_TEMPERATURE

    def check_vocab(self, vocab_size: int) -> None:
        """Raise InvalidRequest if a token id lies outside the model's vocabulary."""
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words", [token_id for word in self.bad_words for token_id in word]),
        ):
            bad = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
            if bad:
                raise InvalidRequest(
                    f"{name}: token id {bad[0]} is outside the vocabulary of {vocab_size}",
                    param=name,
                )

    def _check_range(
        self, name: str, low: float, high: float | None, *, open_low: bool = False
    ) -> None:
        value = getattr(self, name)
        # Comparisons are false for NaN and, unlike math.isfinite, take integers of any size.
        is_ok = value < math.inf and (value > low if open_low else value >= low)
        if not is_ok or (high is not None and value > high):
            floor = "above" if open_low else "at least"
            ceiling = "" if high is None else f" and at most {high:g}"
            raise InvalidRequest(
                f"{name} must be {floor} {low:g}{ceiling}, not {value}", param=name
            )
