"""NativeSession: requests laid into a KV cache by hand, and the logits of the C++ forward."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specdec import noise
from specdec.builtin_model import cache_folder
from specdec.config import WeightPrecision
from specdec.kernels.batch import Batch
from specdec.kernels.native_library import NativeUnavailable, load
from specdec.kernels.segment import Segment, ancestor_masks
from specdec.kv_cache import slot_at
from specdec.model_config import ModelConfig
from specdec.native_model import NativeModel
from specdec.weights import TensorSource
from tests.native_oracle import ToyTensors

MAX_LEN = 700
PRECISIONS = ("fp32", "bf16", "int8", "int4")
KV_PRECISIONS = ("fp32", "bf16", "int8")
SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 37,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
}


@cache
def native_library() -> ctypes.CDLL:
    """The library that the engine uses; where there is no compiler, the test is skipped."""
    try:
        return load(cache_folder() / "native")
    except NativeUnavailable as reason:
        if "no C++ compiler" not in str(reason):
            raise
        pytest.skip(str(reason))


@contextmanager
def choosing_natively() -> Iterator[ctypes.CDLL]:
    """Inside, samplers and verifiers choose with the native library; `noise` is left as it was."""
    library, before = native_library(), noise.native()
    noise.use_native(library)
    try:
        yield library
    finally:
        noise.use_native(before)


@dataclass(frozen=True)
class Rows:
    """Rows of one request in a step, from position `root` on: a chain, or the tree of `parents`."""

    token_ids: Sequence[int]
    root: int
    block_ids: Sequence[int]
    parents: Sequence[int] | None = None


@dataclass(frozen=True)
class Job:
    """A request: how many tokens are known, where their prefill is cut, and what tree follows.

    A node's parent is at most `reach` nodes before it; reach 1 makes a chain.
    """

    num_known: int
    cuts: tuple[int, ...] = ()
    num_nodes: int = 1
    reach: int = 1
    seed: int = 0

    def token_ids(self, vocab_size: int) -> list[int]:
        """Known tokens, then those of the tree's nodes but for its root, the last known one."""
        rng = random.Random(self.seed)
        return [rng.randrange(vocab_size) for _ in range(self.num_known + self.num_nodes - 1)]

    @property
    def bounds(self) -> list[int]:
        """Where chunks begin and end, up to the root."""
        root = self.num_known - 1
        return sorted({0, root, *(cut for cut in self.cuts if cut < root)})

    @property
    def parents(self) -> tuple[int, ...]:
        rng = random.Random(self.seed + 1)
        nodes = range(1, self.num_nodes)
        return (-1, *(rng.randrange(max(0, node - self.reach), node) for node in nodes))

    @property
    def leaf_paths(self) -> list[list[int]]:
        """From the root to every node without children."""
        masks = ancestor_masks(self.parents)
        leaves = sorted(set(range(self.num_nodes)) - set(self.parents))
        return [[n for n in range(leaf + 1) if masks[leaf] >> n & 1] for leaf in leaves]


class NativeSession:
    """A model with random weights and an empty KV cache."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        precision: str,
        kv: str,
        *,
        num_threads: int = 1,
        block_size: int = 16,
        num_blocks: int = 44,
        source: TensorSource | None = None,
        library: ctypes.CDLL | None = None,
    ) -> None:
        self.model = NativeModel(
            library or native_library(),
            ModelConfig.from_checkpoint(fields),
            source or ToyTensors(fields),
            cast(WeightPrecision, precision),
            max_model_len=MAX_LEN,
            num_threads=num_threads,
        )
        self.kv_cache = self.model.make_kv_cache(kv, num_blocks=num_blocks, block_size=block_size)
        self._vocab_size = int(fields["vocab_size"])

    def step(self, *parts: Rows) -> list[Tensor]:
        """One forward; logits of all rows of each part [num_rows, vocab]."""
        segments: list[Segment] = []
        start = 0
        for part in parts:
            masks = None if part.parents is None else ancestor_masks(part.parents)
            num_rows = len(part.token_ids)
            segments.append(Segment(start, num_rows, part.root, part.block_ids, masks))
            start += num_rows
        batch = Batch(
            token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
            positions=tuple(position for segment in segments for position in segment.positions),
            slots=tuple(slot for part in parts for slot in self.slots(part)),
            segments=tuple(segments),
            logit_rows=tuple(range(start)),
            first_logit=(0, start),
        )
        logits = self.model.forward(batch, self.kv_cache).logits.clone()
        return list(logits.split([segment.num_rows for segment in segments]))

    def slots(self, rows: Rows) -> list[int]:
        """Where the keys of rows are written."""
        size, end = self.kv_cache.block_size, rows.root + len(rows.token_ids)
        return [slot_at(rows.block_ids, place, size) for place in range(rows.root, end)]

    def run(self, jobs: Sequence[Job], seed: int = 0) -> list[Tensor]:
        """Prefill all jobs side by side, then all their trees in one step, over scattered blocks.

        Logits of every row of each job: known tokens, and the nodes that follow them.
        """
        free = list(range(self.kv_cache.num_blocks))
        random.Random(seed).shuffle(free)
        tables = []
        for job in jobs:
            count = -(-(job.num_known + job.num_nodes) // self.kv_cache.block_size)
            tables.append(free[:count])
            free = free[count:]
        tokens = [job.token_ids(self._vocab_size) for job in jobs]
        got: list[list[Tensor]] = [[] for _ in jobs]

        def step(parts: Mapping[int, Rows]) -> None:
            for index, logits in zip(parts, self.step(*parts.values()), strict=True):
                got[index].append(logits)

        for turn in range(max(len(job.bounds) for job in jobs) - 1):
            step(
                {
                    index: Rows(tokens[index][start:end], start, tables[index])
                    for index, job in enumerate(jobs)
                    for start, end in list(pairwise(job.bounds))[turn : turn + 1]
                }
            )
        step(
            {
                index: Rows(tokens[index][root:], root, tables[index], parents)
                for index, job in enumerate(jobs)
                for root, parents in [(job.num_known - 1, job.parents)]
            }
        )
        return [torch.cat(parts) for parts in got]

    def alone(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of all tokens as one prefill chunk, in blocks in order."""
        return self.step(Rows(token_ids, 0, range(self.kv_cache.num_blocks)))[0]
