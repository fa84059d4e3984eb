"""NativeSampling: tokens of rows of logits by the native library, the same as the Sampler's.

`kernels/native/sampling.hpp` finds the winner in a tenth of the time and leaves to the caller what
rounding could decide: a token at the very edge of the nucleus, and rows with NaN or infinities.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.native_structs import CDraw
from specdec.params import SamplingParams
from specdec.tree import DraftTree

_MOST_TOP_K = 2**31 - 1


class Walk(NamedTuple):
    """What was chosen from the root on, and the nodes that carry all of it but the last token."""

    token_ids: tuple[int, ...]
    path: tuple[int, ...]


class NativeSampling:
    """How one request's rows are sampled.

    inverse_temperature: fp32, 0 = greedy; min_p_gap: fp32, -log(min_p), None where min-p is off.

    Example: `NativeSampling(library, params, 7, 1.25, None).choose(row, position=12)`.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        params: SamplingParams,
        seed: int,
        inverse_temperature: float,
        min_p_gap: float | None,
    ) -> None:
        self.library = library
        self._sample, self._walk = library.specdec_sample, library.specdec_walk
        self._draw = CDraw(
            seed=seed,
            factor=inverse_temperature,
            top_k=min(params.top_k, _MOST_TOP_K),
            min_p_gap=float("inf") if min_p_gap is None else min_p_gap,
            top_p=params.top_p,
        )

    def choose(self, row: Tensor, position: int) -> int | None:
        """The token of a row [vocab], fp32 and contiguous on the CPU, or None: see above."""
        self._draw.position = position
        token_id: int = self._sample(row.data_ptr(), len(row), self._draw)
        return None if token_id < 0 else token_id

    def walk(
        self, address: int, stride: int, vocab_size: int, tree: DraftTree, position: int
    ) -> Walk | None:
        """Verify a tree by the coupled rule, or None: see above.

        address: of the root's row; the other nodes' follow, `stride` numbers apart. position: of
        the token that follows the root. A walk without tokens: a row is not finite.
        """
        count = len(tree.token_ids)
        data = array("i", (*tree.token_ids, *tree.parents, *bytes(2 * count)))
        at = data.buffer_info()[0]
        out = at + 2 * count * data.itemsize
        self._draw.position = position
        chosen = self._walk(address, stride, vocab_size, at, count, self._draw, out)
        if chosen < 0:
            return None
        token_ids = tuple(data[2 * count : 2 * count + chosen])
        return Walk(token_ids, tuple(data[3 * count : 3 * count + max(0, chosen - 1)]))


def are_finite(library: ctypes.CDLL | None, logits: Tensor) -> list[bool]:
    """Whether each row of logits [n, vocab] holds numbers only."""
    num_rows, vocab_size = logits.shape
    if library is None or not is_readable(logits):
        return logits.isfinite().all(-1).tolist()
    found = ctypes.create_string_buffer(num_rows)
    library.specdec_are_finite(logits.data_ptr(), num_rows, logits.stride(0), vocab_size, found)
    return [byte == 1 for byte in found.raw]


def is_readable(logits: Tensor) -> bool:
    """Whether the library can read logits [..., vocab] where they lie."""
    return logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.stride(-1) == 1
