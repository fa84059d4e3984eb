"""Sampled rows: logits with sampling parameters, for the kernels and for the Sampler alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.row_sampling import RowSampling
from specdec.params import SamplingParams
from specdec.sampling import Sampler
from tests.kernels.device import DEVICE

# Every way of cutting alone and with the others; greedy among them, which cuts nothing.
PARAMS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in (
        (1.0, 0, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (0.0, 5, 0.5, 0.5),
        (1.3, 0, 0.95, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.8, 40, 0.9, 0.03),
        (1e-5, 0, 1.0, 0.0),
        (100.0, 0, 0.5, 0.0),
    )
]


@dataclass(frozen=True)
class SampledRows:
    """Rows of logits [n, vocab] on DEVICE; row i has its own parameters, seed and position."""

    logits: Tensor
    params: Sequence[SamplingParams]

    @property
    def sampling(self) -> RowSampling:
        n = len(self.params)
        seeds = [self.seed(row) for row in range(n)]

        def numbers(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=DEVICE)

        return RowSampling(
            seeds=torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds], device=DEVICE),
            positions=numbers([self.position(row) for row in range(n)], torch.int32),
            inverse_temperature=numbers(
                [0.0 if p.is_greedy else 1 / p.temperature for p in self.params], torch.float32
            ),
            top_k=numbers([p.top_k for p in self.params], torch.int32),
            top_p=numbers([p.top_p for p in self.params], torch.float32),
            min_p=numbers([p.min_p for p in self.params], torch.float32),
        )

    def seed(self, row: int) -> int:
        """64 bits, the highest among them."""
        return (row * 0x9E3779B97F4A7C15 + len(self.params)) % 2**64

    def position(self, row: int) -> int:
        return 1 + 97 * row

    def sampler(self, row: int) -> Sampler:
        prompt = [0] * self.position(row)
        return Sampler(self.params[row], prompt, seed=self.seed(row), eos_token_ids=())

    def thresholds(self) -> Tensor:
        """By the Sampler. fp32 [n]."""
        rows = self.logits.cpu()
        values = [self.sampler(i).threshold(row, []) for i, row in enumerate(rows)]
        return torch.tensor(values, device=DEVICE)


def padded(logits: Tensor) -> Tensor:
    """The same rows at a larger stride. Between them is infinity: a maximum would overlook NaN."""
    num_rows, vocab_size = logits.shape
    wide = logits.new_full((num_rows + 1, vocab_size + 24), float("inf"))
    wide[:num_rows, :vocab_size] = logits
    return wide[:num_rows, :vocab_size]
