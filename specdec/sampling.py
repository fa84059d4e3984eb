"""Sampler: one row of logits and a node's own path in, the target's token out.

Every parameter is evaluated on a single row [vocab] with the path that leads to it, so the result
cannot depend on which other rows were verified beside it. The order of the steps:

    1. repetition penalty (prompt and output), presence and frequency penalty (output)
    2. logit bias, allowed tokens, bad words, no end before min_tokens
    3. temperature: scaled = row * fp32(1 / temperature)
    4. top-k, then top-p over what top-k left, then min-p relative to the likeliest token

A token survives the last step by its value alone, so that truncation is one number per row, the
threshold, and tokens of equal value share their fate. The same number and the same choice come
out of `kernels/truncation.py` and `kernels/gumbel_argmax.py`, and the same choice out of
`kernels/native/sampling.hpp`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import noise
from specdec.native_sampling import NativeSampling, is_readable
from specdec.noise import gumbel, gumbel_all, negative_log
from specdec.params import SamplingParams

_NEG_INF = float("-inf")
_NUCLEUS_GUESS = 256  # top-p looks at this many tokens before it sorts the whole vocabulary


class NothingToChoose(Exception):
    """Every token of a row is banned by the request's own parameters."""


@dataclass(frozen=True)
class Survivors:
    """Tokens that survive truncation, with the target's fully processed log-probabilities.

    `token_ids` int64 [n], ascending, or None for the whole vocabulary; `log_probs` fp32 [n], whose
    exponentials sum to 1.
    """

    token_ids: Tensor | None
    log_probs: Tensor

    def dense(self, vocab_size: int) -> Tensor:
        """p_target over the whole vocabulary, float64 [vocab]."""
        probs = self.log_probs.double().exp()
        if self.token_ids is None:
            return probs
        return torch.zeros(vocab_size, dtype=torch.float64).index_copy_(0, self.token_ids, probs)


class Sampler:
    """Evaluates a request's sampling parameters.

    Example:
        sampler = Sampler(params, prompt_ids, seed=7, eos_token_ids=(2,))
        sampler.choose(logits_row, output_ids=[5, 6])
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.params = params
        self.seed = seed
        # One rounding to fp32, as a GPU kernel is given it.
        inverse = 0.0 if params.is_greedy else 1 / params.temperature
        self.inverse_temperature = float(torch.tensor(inverse, dtype=torch.float32))
        min_p = torch.tensor(params.min_p, dtype=torch.float32)
        is_cutting = min_p >= torch.finfo(torch.float32).tiny  # else too small to cut anything
        self._min_p_gap = float(negative_log(min_p)) if is_cutting else None
        self._num_prompt = len(prompt_ids)
        self._prompt_unique = torch.tensor(sorted(set(prompt_ids)), dtype=torch.int64)
        self._end_ids = torch.tensor(
            sorted({*eos_token_ids, *params.stop_token_ids}), dtype=torch.int64
        )
        self._bans = (
            params.allowed_token_ids is not None
            or len(params.bad_words) > 0
            or params.min_tokens > 0
        )
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._allowed = (
            None
            if params.allowed_token_ids is None
            else torch.tensor(sorted(params.allowed_token_ids), dtype=torch.int64)
        )
        self._native: NativeSampling | None = None

    def position(self, output_ids: Sequence[int]) -> int:
        """Absolute position of the token that follows `output_ids`; keys the noise."""
        return self._num_prompt + len(output_ids)

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may cut tokens."""
        params = self.params
        is_cutting = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        return is_cutting and not params.is_greedy

    def changes_logits(self, num_output: int) -> bool:
        """Whether penalties, bias or bans may change a row that `num_output` tokens lead to."""
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or len(self._bias_ids) > 0
            or self._allowed is not None
            or len(params.bad_words) > 0
            or num_output < params.min_tokens
        )

    def choose(self, logits: Tensor, output_ids: Sequence[int]) -> int:
        """The target's token y = argmax(scaled + Gumbel noise) over the survivors, in fp32.

        logits: [vocab], raw. output_ids: the output that leads to this row, the node's own path
        included. Same seed, position and row give the same token whatever was drafted. The lowest
        token id wins a tie; greedy takes the argmax of the row. Raises NothingToChoose.
        """
        row = self._processed(logits, output_ids)
        position = self.position(output_ids)
        library = noise.native()
        if library is not None and is_readable(row):
            token_id = self.natively(library).choose(row, position)
            if token_id is not None:
                return token_id
        if self.params.is_greedy:
            return int(row.argmax())
        scaled = row * self.inverse_temperature
        token_ids = self._surviving(scaled)
        if token_ids is None:
            return int((scaled + gumbel_all(self.seed, position, len(row), row.device)).argmax())
        own = gumbel(self.seed, position, token_ids)
        return int(token_ids[(scaled[token_ids] + own).argmax()])

    def natively(self, library: ctypes.CDLL) -> NativeSampling:
        """The same choice by the library, from rows that `changes_logits` leaves as they are."""
        if self._native is None or self._native.library is not library:
            self._native = NativeSampling(
                library, self.params, self.seed, self.inverse_temperature, self._min_p_gap
            )
        return self._native

    def threshold(self, logits: Tensor, output_ids: Sequence[int]) -> float:
        """The least value of `scaled` that survives, an fp32 number; -inf where nothing is cut.

        logits: [vocab], raw; output_ids as in `choose`. Greedy: -inf, for truncation cannot
        change an argmax. Tokens at -inf (banned) never survive, whatever the threshold.
        """
        if self.params.is_greedy:
            return _NEG_INF
        return self._threshold(self._processed(logits, output_ids) * self.inverse_temperature)

    def survivors(self, logits: Tensor, output_ids: Sequence[int]) -> Survivors:
        """The fully processed distribution p_target at a node. Greedy: all mass on the argmax."""
        row = self._processed(logits, output_ids)
        if self.params.is_greedy:
            return Survivors(row.argmax()[None], torch.zeros(1))
        scaled = row * self.inverse_temperature
        token_ids = self._surviving(scaled)
        kept = scaled if token_ids is None else scaled[token_ids]
        return Survivors(token_ids, kept.log_softmax(0))

    def _processed(self, logits: Tensor, output_ids: Sequence[int]) -> Tensor:
        """The row after penalties, bias and bans, fp32; the caller's own where it has none."""
        if not self.changes_logits(len(output_ids)):
            return logits.float()
        params = self.params
        row = logits.to(torch.float32, copy=True)
        if params.repetition_penalty != 1.0:
            seen = torch.cat((self._prompt_unique, torch.tensor(output_ids, dtype=torch.int64)))
            scores = row[seen]
            row[seen] = torch.where(
                scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
            )
        if output_ids and (params.presence_penalty or params.frequency_penalty):
            unique, counts = torch.tensor(output_ids).unique(return_counts=True)
            row[unique] -= params.presence_penalty + params.frequency_penalty * counts
        if len(self._bias_ids):
            row[self._bias_ids] += self._bias
        if self._allowed is not None:
            only = torch.full_like(row, _NEG_INF)
            only[self._allowed] = row[self._allowed]
            row = only
        for word in params.bad_words:
            prefix = list(word[:-1])
            if not prefix or list(output_ids[-len(prefix) :]) == prefix:
                row[word[-1]] = _NEG_INF
        if len(output_ids) < params.min_tokens:
            row[self._end_ids] = _NEG_INF
        if self._bans and float(row.max()) == _NEG_INF:
            raise NothingToChoose
        return row

    def _surviving(self, scaled: Tensor) -> Tensor | None:
        """Token ids that survive truncation, ascending, or None for all. int64 [n]."""
        threshold = self._threshold(scaled)
        if threshold > _NEG_INF:
            return (scaled >= threshold).nonzero()[:, 0]
        if self._allowed is None:
            return None
        return (scaled > _NEG_INF).nonzero()[:, 0]

    def _threshold(self, scaled: Tensor) -> float:
        params, threshold = self.params, _NEG_INF
        if 0 < params.top_k < len(scaled):
            last = float(scaled.topk(params.top_k).values[-1])
            if last > _NEG_INF:  # nor NaN
                threshold = last
        if params.top_p == 1.0 and self._min_p_gap is None:
            return threshold
        top = scaled.max()
        if params.top_p < 1.0:
            kept = scaled if threshold == _NEG_INF else scaled[scaled >= threshold]
            threshold = max(threshold, self._nucleus(kept, top))
        if self._min_p_gap is not None:
            threshold = max(threshold, float(top - self._min_p_gap))
        return threshold

    def _nucleus(self, kept: Tensor, top: Tensor) -> float:
        """The least value above which the mass is less than top_p of all. kept: [n], any order."""
        total = (kept - top).exp().sum(dtype=torch.float64)
        for size in sorted({min(_NUCLEUS_GUESS, len(kept)), len(kept)}):
            ranked = kept.topk(size).values
            masses = (ranked - top).exp().cumsum(0, dtype=torch.float64)
            num_full = int((masses < self.params.top_p * total).sum())
            if num_full < size:
                break
        return float(ranked[min(num_full, size - 1)])


def raw_log_probs(
    logits: Tensor, token_id: int, num_top: int
) -> tuple[float, list[tuple[int, float]]]:
    """The token's log-probability and the likeliest `num_top`, before any sampling parameter."""
    log_probs = logits.float().log_softmax(0)
    top = log_probs.topk(min(num_top, len(log_probs)))
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return float(log_probs[token_id]), pairs
