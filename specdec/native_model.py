"""NativeModel: the target model on a CPU, one call into C++ per forward."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from struct import Struct

import torch
from torch import Tensor

from specdec.config import WeightPrecision
from specdec.cores import usable_cores
from specdec.kernels.batch import Batch
from specdec.kernels.native_structs import CCache, CModel, CStep
from specdec.model_config import ModelConfig
from specdec.native_cache import NativeKVCache, integers
from specdec.native_linear import NativeLinear
from specdec.native_weights import IntegerSource, NativeWeights
from specdec.target import TargetOutput
from specdec.weights import TensorSource

_MOST_KEPT_ROWS = 64
_Output = tuple[TargetOutput, int, int]  # and the addresses of logits and states
_put_step = Struct("9P4i").pack_into  # CStep; ctypes sets a field in the time of several lines
assert Struct("9P4i").size == ctypes.sizeof(CStep)


class NativeModel:
    """The model of `TargetModel`, for a CPU: kernels/native/forward.hpp.

    `precision` is fp32, bf16, int8 or int4. Rows are invariant whatever the batch, without
    padding. Logits are fp32.

    Example:
        model = NativeModel(library, config, weights, "bf16", max_model_len=2048)
        kv_cache = model.make_kv_cache("bf16", num_blocks=64, block_size=32)
        logits = model.forward(batch, kv_cache).logits
    """

    device = torch.device("cpu")
    logits_dtype = torch.float32

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        source: TensorSource,
        precision: WeightPrecision,
        *,
        max_model_len: int,
        num_threads: int | None = None,
        integers: IntegerSource | None = None,
        lender: NativeModel | None = None,
    ) -> None:
        self.config = config
        self.precision = precision
        self.num_threads = num_threads or usable_cores()
        self._library = library
        lent: NativeWeights | None = None if lender is None else lender.weights
        self.weights: NativeWeights = NativeWeights(
            library, config, source, precision, integers, lent
        )
        self._cos, self._sin = (t.contiguous() for t in config.rope.tables(max_model_len))
        described = CModel(
            layers=self.weights.layers,
            final_norm=self.weights.final_norm,
            embedding=self.weights.embedding,
            head=self.weights.head,
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.norm_eps,
            scale=config.head_dim**-0.5,
        )
        self._forward = library.specdec_open(ctypes.byref(described), self.num_threads)
        weakref.finalize(self, library.specdec_close, self._forward)
        self._run = library.specdec_forward
        self._step = bytearray(ctypes.sizeof(CStep))
        self._described_step = CStep.from_buffer(self._step)
        self._logits = torch.empty(0, self.weights.head.out)
        self._hidden = torch.empty(0, config.hidden_size)
        self._outputs: dict[int, _Output] = {}  # by number of rows: views of these two

    def kv_bytes_per_block(self, kv: str, block_size: int) -> int:
        """Memory of one block of a KV cache of this precision over all layers, in bytes."""
        return NativeKVCache.bytes_per_block(self.config, self._kv_precision(kv), block_size)

    def make_kv_cache(self, kv: str, *, num_blocks: int, block_size: int) -> NativeKVCache:
        """An empty KV cache in fp32, bf16 or int8; `auto` is bf16, or fp32 with fp32 weights."""
        return NativeKVCache(
            self.config,
            self._kv_precision(kv),
            num_blocks=num_blocks,
            block_size=block_size,
            mover=self._move,
        )

    @property
    def weight_bytes(self) -> int:
        """Memory of its weights."""
        return self.weights.num_kept_bytes

    def make_linear(self, weight: Tensor) -> NativeLinear:
        """A matrix [out_features, in_features] of the caller's own, packed as the model's are."""
        precision = "fp32" if self.precision == "fp32" else "bf16"
        return NativeLinear(self._library, self._forward, weight, precision, owner=self)

    def _kv_precision(self, kv: str) -> str:
        if kv == "auto":
            return "fp32" if self.precision == "fp32" else "bf16"
        return kv

    def forward(self, batch: Batch, kv_cache: NativeKVCache) -> TargetOutput:
        """Logits and hidden states in fp32; writes the batch's keys and values to the cache."""
        num_rows, num_logits = len(batch.token_ids), len(batch.logit_rows)
        # One array for all: the weights have swept every cache, and cold calls are what this costs.
        data = array("i", (*batch.token_ids, *batch.positions, *batch.slots, *batch.logit_rows))
        blocks: list[int] = []
        paths = bytearray()
        for segment in batch.segments:
            first_path = -1 if segment.ancestors is None else len(paths)
            start, count = segment.start, segment.num_rows
            data.extend((start, count, segment.root, len(blocks), first_path))
            blocks += segment.block_ids
            for row in range(count if segment.ancestors is not None else 0):
                path = segment.path(row)
                paths += bytes(path) + bytes(count - len(path))
        first_block = len(data)
        data.extend(blocks)
        first_path = len(data)
        data.frombytes(paths + bytes(-len(paths) % data.itemsize))
        at = data.buffer_info()[0]
        row_bytes = num_rows * data.itemsize
        output, logits_at, hidden_at = self._outputs.get(num_logits) or self._output(num_logits)
        _put_step(
            self._step,
            0,
            at,
            at + row_bytes,
            at + 2 * row_bytes,
            at + 3 * row_bytes + num_logits * data.itemsize,
            at + first_block * data.itemsize,
            at + first_path * data.itemsize,
            at + 3 * row_bytes,
            logits_at,
            hidden_at,
            num_rows,
            len(batch.segments),
            num_logits,
            0,
        )
        self._run(self._forward, kv_cache.described, self._described_step)
        return output

    def _output(self, num_logits: int) -> _Output:
        """Where so many rows' logits and states go, each time the same: TargetOutput allows it."""
        logits, hidden = self._logits, self._hidden
        if num_logits > len(logits):
            logits = torch.empty(num_logits, self.weights.head.out)
            hidden = torch.empty(num_logits, self.config.hidden_size)
            if num_logits <= _MOST_KEPT_ROWS:
                self._logits, self._hidden = logits, hidden
                self._outputs.clear()
        views = logits[:num_logits, : self.config.vocab_size], hidden[:num_logits]
        made = TargetOutput(*views), logits.data_ptr(), hidden.data_ptr()
        if num_logits <= _MOST_KEPT_ROWS:
            self._outputs[num_logits] = made
        return made

    def _move(self, cache: CCache, src: Sequence[int], dst: Sequence[int]) -> None:
        self._library.specdec_move(
            self._forward, ctypes.byref(cache), integers(src), integers(dst), len(src)
        )
