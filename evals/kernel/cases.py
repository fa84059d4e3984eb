"""The kernel cases that are measured: shapes of an 8B Llama on a GPU, a few small ones on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

import torch

from specdec.evals.kernel.attention_cases import TreeAttention
from specdec.evals.kernel.case import Dims, KernelCase
from specdec.evals.kernel.row_cases import RmsNorm, RopeWrite, SiluMul
from specdec.evals.kernel.step_cases import Choice, MoveSlots, Walk

CONTEXTS = (256, 2048, 8192, 32768, 131072)
ROWS = (1, 16, 64, 256)
# (context, nodes, batch): every size of one request, and batches whose keys and values fit 40 GB.
ATTENTION = (
    *((context, nodes, 1) for context, nodes in product(CONTEXTS, ROWS)),
    *((context, nodes, 8) for context, nodes in product((2048, 8192, 32768), (1, 16))),
    (2048, 64, 8),
    (131072, 16, 8),
    (2048, 1, 64),
    (2048, 16, 64),
    (8192, 16, 64),
    (32768, 1, 64),
)
ATTENTION_FP8 = ((2048, 16, 1), (32768, 16, 1), (131072, 64, 1), (8192, 16, 8))
QUICK_ATTENTION = ((2048, 1, 1), (32768, 16, 1), (8192, 16, 8))
KINDS: tuple[Literal["greedy", "temperature", "top-p"], ...] = ("greedy", "temperature", "top-p")


def gpu_cases(*, is_quick: bool) -> list[KernelCase]:
    """Every op at the sizes of an 8B Llama in bf16; quick: about a tenth, every op among them."""
    dims, dtype = Dims(), torch.bfloat16
    if is_quick:
        return [
            *(TreeAttention(*sizes, dims, dtype) for sizes in QUICK_ATTENTION),
            TreeAttention(*QUICK_ATTENTION[1], dims, dtype, is_deterministic=True),
            TreeAttention(*QUICK_ATTENTION[1], dims, dtype, is_e4m3=True),
            *_small(dims, dtype, rows=(16,), choice_rows=(16,), trees=(1,), moves=(4,)),
        ]
    return [
        *(TreeAttention(*sizes, dims, dtype) for sizes in ATTENTION),
        *(TreeAttention(*sizes, dims, dtype, is_deterministic=True) for sizes in ATTENTION),
        *(TreeAttention(*sizes, dims, dtype, is_e4m3=True) for sizes in ATTENTION_FP8),
        *_small(dims, dtype, rows=ROWS, choice_rows=ROWS, trees=(1, 16), moves=(1, 4, 16, 64)),
    ]


def cpu_cases(*, is_quick: bool) -> list[KernelCase]:
    """The references' cases: fp32 and small, for they are here to be right, not fast."""
    dims = Dims(num_layers=4)
    rows = (16,) if is_quick else (1, 16)
    return [
        *(
            TreeAttention(context, n, 1, dims, torch.float32)
            for context in (256, 2048)
            for n in rows
        ),
        *_small(dims, torch.float32, rows=rows, choice_rows=(1,), trees=(1,), moves=(4,)),
    ]


def _small(
    dims: Dims,
    dtype: torch.dtype,
    *,
    rows: tuple[int, ...],
    choice_rows: tuple[int, ...],
    trees: tuple[int, ...],
    moves: tuple[int, ...],
) -> Iterator[KernelCase]:
    for n in rows:
        yield RmsNorm(n, dims.hidden, dtype)
        yield RmsNorm(n, dims.hidden, dtype, has_delta=True)
        yield SiluMul(n, dims.inner, dtype)
        yield RopeWrite(n, dims, dtype)
    for kind, n in product(KINDS, choice_rows):
        yield Choice(n, kind, dims.vocab_size, dtype)
    for count, n in product(trees, rows):
        yield Walk(count, n)
    for count in moves:
        yield MoveSlots(count, dims, dtype)
