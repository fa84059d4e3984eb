"""TargetModel: one parametrised decoder for the Llama family."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.batch import Batch
from specdec.kernels import reference as ops
from specdec.kv_cache import KVCache
from specdec.model_config import ModelConfig
from specdec.row_invariance import min_rows, padding
from specdec.weights import LayerWeights, ModelWeights


class TargetModel:
    """Maps a batch of query tokens to logits, writing their keys and values to the KV cache.

    The residual stream and everything between matrix products is fp32; the products run in the
    weights' dtype. Rows are invariant in batches padded by `padding`.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        device = weights.embedding.device
        self._cos, self._sin = (t.to(device) for t in config.rope.tables(max_model_len))
        self._scale = config.head_dim**-0.5
        sample = weights.layers[0]
        products = (sample.qkv, sample.output, sample.gate_up, sample.down, weights.head)
        self.min_rows = min_rows(products, weights.dtype)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Logits of the rows in `batch.logit_rows`, in the weights' dtype [num_logits, vocab]."""
        cos = self._cos[batch.positions].unsqueeze(1)  # [num_rows, 1, head_dim]
        sin = self._sin[batch.positions].unsqueeze(1)
        num_written = len(batch.slots)  # padding rows write nothing
        places = ops.slot_rows(batch.slots, self.config.num_kv_heads, kv_cache.block_size).flatten()
        x = self.weights.embedding[batch.token_ids].float()  # [num_rows, hidden]
        for index, layer in enumerate(self.weights.layers):
            groups = batch.groups[self.config.windows[index]]
            qkv = layer.qkv(self._norm(x, layer.input_norm))
            q, k, v = self._heads(qkv, layer, cos, sin)
            k_cache, v_cache = kv_cache.layer(index)
            ops.write_kv(k_cache, v_cache, places, k[:num_written], v[:num_written])
            mixed = ops.tree_attention(q, k_cache, v_cache, groups, self._scale)
            x = x + layer.output(mixed.flatten(1).to(self.weights.dtype))
            gate_up = layer.gate_up(self._norm(x, layer.mlp_norm))
            x = x + layer.down(ops.silu_mul(gate_up))
        return self._logits(x[batch.logit_rows])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, self.config.norm_eps).to(self.weights.dtype)

    def _heads(
        self, qkv: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split the fused product into rotated queries, rotated keys and values, all fp32."""
        config = self.config
        num_q, num_kv = config.num_heads, config.num_kv_heads
        heads = qkv.float().view(qkv.shape[0], -1, config.head_dim)
        q_k, v = heads[:, : num_q + num_kv], heads[:, num_q + num_kv :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q_k[:, :num_q], layer.q_norm, config.norm_eps)
            k = ops.rms_norm(q_k[:, num_q:], layer.k_norm, config.norm_eps)
            q_k = torch.cat((q, k), dim=1)
        q_k = ops.rope(q_k, cos, sin)
        return q_k[:, :num_q], q_k[:, num_q:], v

    def _logits(self, x: Tensor) -> Tensor:
        num_logits = x.shape[0]
        if missing := padding(num_logits, self.min_rows):
            x = torch.nn.functional.pad(x, (0, 0, 0, missing))
        return self.weights.head(self._norm(x, self.weights.final_norm))[:num_logits]
