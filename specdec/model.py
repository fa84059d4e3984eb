"""TargetModel: one parametrised decoder for the Llama family."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.config import WeightPrecision
from specdec.kernels.step_ops import HeadShape, StepOps
from specdec.kv_cache import KVCache
from specdec.model_config import ModelConfig
from specdec.row_invariance import min_rows, padding
from specdec.target import TargetOutput
from specdec.weights import ModelWeights, PackedLinear

_KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class TargetModel:
    """Maps a step's query tokens to logits, writing their keys and values to the KV cache.

    The residual stream and everything between matrix products is fp32; the products run in the
    weights' dtype. With a row tile, rows are invariant in batches padded by `padding`.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        device = weights.embedding.device
        self.cos, self.sin = (t.to(device) for t in config.rope.tables(max_model_len))
        self.heads = HeadShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.head_dim**-0.5,
            config.norm_eps,
        )
        self.min_rows = 1
        if weights.row_tile is not None:
            sample = weights.layers[0]
            products = (sample.qkv, sample.output, sample.gate_up, sample.down, weights.head)
            is_cpu = device.type == "cpu"
            self.min_rows = min_rows(products, weights.dtype) if is_cpu else weights.row_tile

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.weights.embedding.device

    @property
    def logits_dtype(self) -> torch.dtype:
        """What its logits are in: the weights' dtype."""
        return self.weights.dtype

    def kv_bytes_per_block(self, kv: str, block_size: int) -> int:
        """Memory of one block of a KV cache of this precision over all layers, in bytes."""
        shape = self.config
        return KVCache.bytes_per_block(
            shape.num_layers, shape.num_kv_heads, block_size, shape.head_dim, self._kv_dtype(kv)
        )

    def make_kv_cache(self, kv: str, *, num_blocks: int, block_size: int) -> KVCache:
        """An empty KV cache; `auto` is fp32 on a CPU and the weights' dtype on a GPU."""
        return KVCache(
            num_layers=self.config.num_layers,
            num_blocks=num_blocks,
            num_kv_heads=self.config.num_kv_heads,
            block_size=block_size,
            head_dim=self.config.head_dim,
            dtype=self._kv_dtype(kv),
            device=self.device,
        )

    @property
    def precision(self) -> WeightPrecision:
        """Of its weights: bf16, fp16 or fp32."""
        names: dict[torch.dtype, WeightPrecision] = {
            torch.bfloat16: "bf16",
            torch.float16: "fp16",
            torch.float32: "fp32",
        }
        return names[self.weights.dtype]

    @property
    def weight_bytes(self) -> int:
        """Memory of its weights."""
        return self.weights.num_bytes

    def make_linear(self, weight: Tensor) -> PackedLinear:
        """A matrix [out_features, in_features] of the caller's own, packed as the model's are."""
        weight = weight.to(self.device, self.weights.dtype)
        return PackedLinear(weight, row_tile=self.weights.row_tile)

    def _kv_dtype(self, kv: str) -> torch.dtype:
        if kv == "auto":
            return torch.float32 if self.device.type == "cpu" else self.weights.dtype
        return _KV_DTYPES[kv]

    def padding(self, num_rows: int) -> int:
        """Rows to add to a batch of `num_rows` for its rows to be invariant."""
        tile = self.weights.row_tile
        return 0 if tile is None else padding(num_rows, self.min_rows, tile)

    @torch.inference_mode()
    def forward(self, ops: StepOps, kv_cache: KVCache) -> TargetOutput:
        """Logits and hidden states of the rows in `ops.logit_rows`, in the weights' dtype."""
        eps, dtype = self.config.norm_eps, self.weights.dtype
        x = self.weights.embedding[ops.token_ids].float()  # [num_rows, hidden]
        delta: Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            cache = kv_cache.layer(index)
            x, normed = ops.add_rms_norm(x, delta, layer.input_norm, eps, dtype)
            q = ops.rope_write(layer.qkv(normed), layer.q_norm, layer.k_norm, cache)
            mixed = ops.tree_attention(q, cache, self.config.windows[index])
            attended = layer.output(mixed.flatten(1).to(dtype))
            x, normed = ops.add_rms_norm(x, attended, layer.mlp_norm, eps, dtype)
            delta = layer.down(ops.silu_mul(layer.gate_up(normed)))
        assert delta is not None
        return self._logits(ops, x[ops.logit_rows], delta[ops.logit_rows])

    def _logits(self, ops: StepOps, x: Tensor, delta: Tensor) -> TargetOutput:
        num_logits = x.shape[0]
        if missing := self.padding(num_logits):
            x, delta = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (x, delta))
        norm = self.weights.final_norm
        _, normed = ops.add_rms_norm(x, delta, norm, self.config.norm_eps, self.weights.dtype)
        return TargetOutput(self.weights.head(normed), normed).first(num_logits)
