"""NativeModel: the target model on a CPU, one call into C++ per forward."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.cores import usable_cores
from specdec.kernels.batch import Batch
from specdec.kernels.native_library import CCache, CModel, CSegment, CStep
from specdec.model_config import ModelConfig
from specdec.native_cache import NativeKVCache, integers
from specdec.native_linear import NativeLinear
from specdec.native_weights import IntegerSource, NativeWeights
from specdec.target import TargetOutput
from specdec.weights import TensorSource


class NativeModel:
    """The model of `TargetModel`, for a CPU: kernels/native/forward.cpp.

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
        precision: str,
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
        blocks: list[int] = []
        paths = bytearray()
        segments = []
        for segment in batch.segments:
            first_path = -1 if segment.ancestors is None else len(paths)
            segments.append(
                CSegment(segment.start, segment.num_rows, segment.root, len(blocks), first_path)
            )
            blocks += segment.block_ids
            for row in range(segment.num_rows if segment.ancestors is not None else 0):
                path = segment.path(row)
                paths += bytes(path) + bytes(segment.num_rows - len(path))
        logits = torch.empty(len(batch.logit_rows), self.weights.head.out)
        hidden = torch.empty(len(batch.logit_rows), self.config.hidden_size)
        step = CStep(
            token_ids=integers(batch.token_ids),
            positions=integers(batch.positions),
            slots=integers(batch.slots),
            segments=(CSegment * len(segments))(*segments),
            blocks=integers(blocks),
            paths=bytes(paths),
            logit_rows=integers(batch.logit_rows),
            logits=logits.data_ptr(),
            hidden=hidden.data_ptr(),
            num_rows=batch.num_rows,
            num_segments=len(segments),
            num_logits=len(batch.logit_rows),
        )
        self._library.specdec_forward(
            self._forward, ctypes.byref(kv_cache.described), ctypes.byref(step)
        )
        return TargetOutput(logits[:, : self.config.vocab_size], hidden)

    def _move(self, cache: CCache, src: Sequence[int], dst: Sequence[int]) -> None:
        self._library.specdec_move(
            self._forward, ctypes.byref(cache), integers(src), integers(dst), len(src)
        )
