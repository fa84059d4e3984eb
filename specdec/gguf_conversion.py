"""GGUF conversion: a Llama in one quantised file becomes an ordinary checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specdec.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

INTEGERS = "integers.safetensors"
INTEGER_KINDS = ("Q4_1", "Q8_0")
GROUP_BYTES = {"int8": 34, "int4": 20}  # of 32 features: Q8_0, Q4_1
CONTROL, USER_DEFINED = 3, 4  # token types of a GGUF
GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

CONFIG_FIELDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
    "head_dim": "llama.rope.dimension_count",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "max_position_embeddings": "llama.context_length",
    "num_attention_heads": "llama.attention.head_count",
    "num_hidden_layers": "llama.block_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "vocab_size": "llama.vocab_size",
}


class Stages(Protocol):
    """Who is told how far a conversion has come."""

    def start(self, text: str, total: int | None = None) -> None:
        """A stage of `total` steps begins; None: unknown."""

    def advance(self) -> None:
        """One more step of the stage is done."""


def convert(gguf: Path, folder: Path, stages: Stages) -> None:
    """Write the Llama model in the file `gguf` as a checkpoint into `folder`, weights in bf16.

    Beside it goes `INTEGERS`: the blocks of the tensors in Q4_1 and Q8_0 as they are, uint8
    [out_features, bytes of a row] under the same names, for --weights int4 and int8.
    """
    stages.start("reading the model file")
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    config = _llama_config(reader)
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stages.start("converting the weights", len(reader.tensors))
    weights, integers = {}, {}
    for tensor in reader.tensors:
        *layer, part, kind = tensor.name.split(".")
        if part not in GGUF_NAMES:
            raise CheckpointError(f"the model file has a tensor {tensor.name} that Llama has not")
        name = f"model.layers.{layer[1]}." if layer else ""
        name += f"{GGUF_NAMES[part]}.{kind}"
        rows = num_heads.get(part)
        values = _unpermuted(dequantize(tensor.data, tensor.tensor_type), rows)
        weights[name] = torch.tensor(values).to(torch.bfloat16)
        if tensor.tensor_type.name in INTEGER_KINDS:
            integers[name] = torch.tensor(_unpermuted(tensor.data, rows))
        stages.advance()
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    stages.start("writing the checkpoint")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(integers, folder / INTEGERS)
    write_json(folder / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    _write_tokenizer(reader, folder)


def _unpermuted(rows: np.ndarray, num_heads: int | None) -> np.ndarray:
    """Rows of q or k in order: a GGUF has the two halves of each head interleaved for its RoPE."""
    if num_heads is None:
        return rows
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise CheckpointError(f"the model file has no {key}; run `specdec pull` again")
    return field.contents()


def _llama_config(reader: GGUFReader) -> dict[str, Any]:
    if (found := _field(reader, "general.architecture")) != "llama":
        raise CheckpointError(f"the model file has architecture {found!r}, expected 'llama'")
    config = {name: _field(reader, key) for name, key in CONFIG_FIELDS.items()}
    # Stored as float32: seven digits give back the number that was meant (1e-05).
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.7g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        **config,
    }


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"the model file has tokenizer {kind}, expected ('gpt2', 'smollm')")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=token_type == CONTROL, normalized=False)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.save(str(folder / "tokenizer.json"))

    template = _field(reader, "tokenizer.chat_template")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": tokens[_field(reader, f"tokenizer.ggml.{key}_token_id")]
        for name, key in keys.items()
    }
    write_json(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "chat_template": template,
            "clean_up_tokenization_spaces": False,
            "model_max_length": _field(reader, "llama.context_length"),
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
        },
    )


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON in UTF-8."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
