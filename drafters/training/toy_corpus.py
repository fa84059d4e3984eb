"""ToyCorpus: a tiny random target and what it might have written, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.drafters.training.corpus import CONFIG_FILE, TrainingSequence, write_shard

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def write_toy_target(folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """A Llama checkpoint of CONFIG with random weights (no tokenizer); returns its tensors."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    q = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def random(*shape: int) -> Tensor:
        drawn: Tensor = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return drawn

    tensors = {
        "model.embed_tokens.weight": random(CONFIG["vocab_size"], hidden),
        "model.norm.weight": 1 + 0.1 * random(hidden),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        root = f"model.layers.{layer}"
        for name, shape in shapes.items():
            tensors[f"{root}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{root}.{name}.weight"] = 1 + 0.1 * random(hidden)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(CONFIG)), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def toy_sequences(
    embedding: Tensor, num_sequences: int, *, seed: int = 0, num_outputs: int = 24
) -> list[TrainingSequence]:
    """Texts in which each token says the next one, and the states that would choose them.

    embedding: [vocab, hidden]. Half are greedy; the others take a random token now and then, so
    that there is something to be wrong about.
    """
    generator = torch.Generator().manual_seed(seed)
    vocab = len(embedding)
    follows = torch.randperm(vocab, generator=generator)
    sequences = []
    for index in range(num_sequences):
        num_prompt = 2 + index % 5
        ids = torch.randint(vocab, (num_prompt,), generator=generator).tolist()
        for _ in range(num_outputs - index % 7):
            is_odd = index % 2 and float(torch.rand((), generator=generator)) < 0.1
            odd = int(torch.randint(vocab, (), generator=generator))
            ids.append(odd if is_odd else int(follows[ids[-1]]))
        token_ids = torch.tensor(ids, dtype=torch.int32)
        said = embedding[follows[token_ids[num_prompt - 1 : -1].long()]]
        hidden = 6 * said / said.norm(dim=1, keepdim=True) ** 2
        sequences.append(
            TrainingSequence(
                token_ids, num_prompt, hidden.bfloat16(), float(index % 2), f"task-{index % 3}"
            )
        )
    return sequences


def write_toy_corpus(folder: Path, num_sequences: int = 60, *, seed: int = 0) -> Path:
    """A folder with a toy target in `target/` and a corpus of it in two shards; returns it."""
    embedding = write_toy_target(folder / "target", seed)["model.embed_tokens.weight"]
    sequences = toy_sequences(embedding, num_sequences, seed=seed)
    middle = num_sequences // 2
    for index, part in enumerate((sequences[:middle], sequences[middle:])):
        write_shard(folder / f"shard-{index:05}.safetensors", part)
    config = {
        "model": str(folder / "target"),
        "weights": "fp32",
        "hidden_size": CONFIG["hidden_size"],
        "vocab_size": CONFIG["vocab_size"],
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    return folder
