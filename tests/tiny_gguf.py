"""Tiny GGUF: a two-layer Llama in one file, as converters write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from specdec.gguf_conversion import GGUF_NAMES

Arrays = dict[str, np.ndarray[Any, Any]]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 16, 96, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
TOKENS += ["\u0120\u0120", "12", "ab", "<think>"]
TEMPLATE = "{{ messages[0].content }}<|im_end|>"
SHAPES = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
for layer in range(LAYERS):
    prefix = f"model.layers.{layer}."
    SHAPES |= {
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": (MLP, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (MLP, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, MLP),
    }


def gguf_name(name: str) -> str:
    module, kind = name.removeprefix("model.").rsplit(".", 1)
    parts = module.split(".", 2)
    if parts[0] != "layers":
        return {"embed_tokens": "token_embd", "norm": "output_norm"}[module] + f".{kind}"
    back = {hf: short for short, hf in GGUF_NAMES.items()}
    return f"blk.{parts[1]}.{back.get(parts[2], parts[2])}.{kind}"


def write_gguf(path: Path, weights: Arrays) -> None:
    """A tiny Llama as converters write it: q and k rows interleaved, matrices in Q4_1."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 4), 4])
    writer.add_token_merges(["\u0120 \u0120", "1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if heads is not None:  # rows 0, half, 1, half + 1, ... of each head
            order = np.arange(weight.shape[0]).reshape(heads, 2, HEAD_DIM // 2)
            weight = weight[order.transpose(0, 2, 1).ravel()]
        if weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(gguf_name(name), gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_weights() -> Arrays:
    """Weights by the names of a checkpoint, always the same."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
