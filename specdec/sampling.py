"""Sampler: one row of logits and a node's own path in, the target's token out.

Every parameter is evaluated on a single row [vocab] with the path that leads to it, so the result
cannot depend on which other rows were verified beside it. The order of the steps:

    1. repetition penalty (prompt and output), presence and frequency penalty (output)
    2. logit bias, allowed tokens, bad words, no end before min_tokens
    3. temperature
    4. top-k, then top-p over what top-k left, then min-p relative to the likeliest token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.noise import gumbel, gumbel_all
from specdec.params import SamplingParams

_NEG_INF = float("-inf")
_NUCLEUS_GUESS = 256  # top-p looks at this many tokens before it sorts the whole vocabulary


@dataclass(frozen=True)
class Survivors:
    """Tokens that survive truncation, with the target's fully processed log-probabilities.

    `token_ids` int64 [n], or None for the whole vocabulary in order; `log_probs` [n], sums to 1.
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
        self._num_prompt = len(prompt_ids)
        self._prompt_unique = torch.tensor(sorted(set(prompt_ids)), dtype=torch.int64)
        self._end_ids = torch.tensor(
            sorted({*eos_token_ids, *params.stop_token_ids}), dtype=torch.int64
        )
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._allowed = (
            None
            if params.allowed_token_ids is None
            else torch.tensor(sorted(params.allowed_token_ids), dtype=torch.int64)
        )

    def position(self, output_ids: Sequence[int]) -> int:
        """Absolute position of the token that follows `output_ids`; keys the noise."""
        return self._num_prompt + len(output_ids)

    def choose(self, logits: Tensor, output_ids: Sequence[int]) -> int:
        """The target's token y = argmax(log p_target + Gumbel noise), or argmax when greedy.

        logits: [vocab], raw. output_ids: the output that leads to this row, the node's own path
        included. Same seed, position and row give the same token whatever was drafted.
        """
        if self.params.is_greedy:
            return int(self._processed(logits, output_ids).argmax())
        survivors = self.survivors(logits, output_ids)
        position = self.position(output_ids)
        if survivors.token_ids is None:
            noise = gumbel_all(self.seed, position, len(survivors.log_probs), logits.device)
            return int((survivors.log_probs + noise).argmax())
        noise = gumbel(self.seed, position, survivors.token_ids)
        return int(survivors.token_ids[(survivors.log_probs + noise).argmax()])

    def survivors(self, logits: Tensor, output_ids: Sequence[int]) -> Survivors:
        """The fully processed distribution p_target at a node. Greedy: all mass on the argmax."""
        params = self.params
        row = self._processed(logits, output_ids)
        if params.is_greedy:
            return Survivors(row.argmax()[None], torch.zeros(1))
        row = row / params.temperature
        if params.top_k or params.top_p < 1.0 or params.min_p > 0.0 or self._allowed is not None:
            token_ids = self._truncate(row)
            return Survivors(token_ids, row[token_ids].log_softmax(0))
        return Survivors(None, row.log_softmax(0))

    def _processed(self, logits: Tensor, output_ids: Sequence[int]) -> Tensor:
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
        return row

    def _truncate(self, row: Tensor) -> Tensor:
        """Token ids that survive top-k, top-p and min-p, likeliest first. int64 [n]."""
        params = self.params
        limit = min(params.top_k or len(row), len(row))
        ranked, ids = row.topk(min(limit, _NUCLEUS_GUESS))
        if limit > len(ranked) and not self._is_enough(row, ranked):
            ranked, ids = row.topk(limit)
        keep = ranked > _NEG_INF
        # Mass is relative to what top-k left: the tail counts unless top-k has cut it.
        total = (ranked if params.top_k else row).logsumexp(0)
        probs = (ranked - total).exp()
        if params.top_p < 1.0:
            keep &= probs.cumsum(0) - probs < params.top_p
        if params.min_p > 0.0:
            keep &= probs >= params.min_p * probs[0]
        keep[0] = True
        return ids[keep]

    def _is_enough(self, row: Tensor, ranked: Tensor) -> bool:
        """Whether the tokens beyond `ranked` are sure to be truncated."""
        params = self.params
        if params.top_k:
            return False  # the nucleus is relative to all k
        last = float((ranked[-1] - ranked[0]).exp())
        if last == 0.0 or last < params.min_p:
            return True
        mass = float((ranked - row.logsumexp(0)).exp().sum())
        return mass - last > params.top_p


def raw_log_probs(
    logits: Tensor, token_id: int, num_top: int
) -> tuple[float, list[tuple[int, float]]]:
    """The token's log-probability and the likeliest `num_top`, before any sampling parameter."""
    log_probs = logits.float().log_softmax(0)
    top = log_probs.topk(min(num_top, len(log_probs)))
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return float(log_probs[token_id]), pairs
