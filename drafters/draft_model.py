"""DraftModel: a checkpoint of a small model, loaded to guess for one target."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec import checkpoints
from specdec.config import EngineConfig
from specdec.errors import CheckpointError, UsageError
from specdec.loading import LoadedModel, load_target
from specdec.model_config import ModelConfig
from specdec.target import Target
from specdec.tokenizer import Tokenizer
from specdec.weights import TensorSource

SHARES = "shares_embeddings_with"  # in config.json: the target whose embedding and head it uses
VOCABULARY = "vocabulary"  # tensor: the tokens that a head of fewer rows stands for

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A model in memory and what its logits stand for.

    `vocabulary` int64 [num_logits] maps columns of its logits to the target's tokens.
    """

    model: Target
    vocabulary: Tensor
    max_position: int

    @classmethod
    def load(cls, folder: Path, target: LoadedModel, config: EngineConfig) -> DraftModel:
        """Read a checkpoint: a whole model, or layers that share the target's embedding and head.

        Raises CheckpointError, UnsupportedModel or UsageError before anything is served.
        """
        raw = checkpoints.load_config(folder)
        shape = ModelConfig.from_checkpoint(raw)
        weights = checkpoints.open_weights(folder)
        source: TensorSource = weights
        lender = target.model if SHARES in raw else None
        vocab_size = target.model.config.vocab_size
        if SHARES in raw:
            shape, source = _borrowing(raw, shape, weights, folder, target)
        else:
            _check_tokenizers(folder, target)
        if SHARES in raw and VOCABULARY in weights:
            vocabulary = weights.get(VOCABULARY).long()
        else:
            vocabulary = torch.arange(min(shape.vocab_size, vocab_size))
        check_shapes(folder, source, shape)
        if SHARES not in raw and not shape.is_tied:
            check_shape(folder, HEAD, weights.get(HEAD), (shape.vocab_size, shape.hidden_size))
        own = dataclasses.replace(config, weights=_precision(config))
        max_position = min(shape.max_position, target.max_model_len)
        model = load_target(own, shape, source, max_position, lender=lender)
        return cls(model, vocabulary, max_position)


def check_shapes(folder: Path, source: TensorSource, shape: ModelConfig) -> None:
    """Raise CheckpointError naming the first tensor that is not what config.json says."""
    for name, expected in expected_shapes(shape).items():
        check_shape(folder, name, source.get(name), expected)


def check_shape(folder: Path, name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise CheckpointError naming file, tensor, expected and found shape."""
    if tuple(tensor.shape) != expected:
        raise CheckpointError(
            f"{folder}: tensor {name} has shape {list(tensor.shape)}, expected {list(expected)};"
            " is it a checkpoint for this model?"
        )


def expected_shapes(shape: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight matrix and norm of a decoder and its shape."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    rows_q, rows_kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    per_layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (rows_q, hidden),
        "self_attn.k_proj": (rows_kv, hidden),
        "self_attn.v_proj": (rows_kv, hidden),
        "self_attn.o_proj": (hidden, rows_q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        for name, expected in per_layer.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = expected
    return {**shapes, "model.norm.weight": (hidden,)}


class _Borrowing:
    """Tensors of a checkpoint, with embedding and head rows of the target's."""

    def __init__(self, weights: checkpoints.Weights, embedding: Tensor, head: Tensor) -> None:
        self._weights = weights
        self._borrowed = {EMBEDDING: embedding, HEAD: head}

    def get(self, name: str) -> Tensor:
        found = self._borrowed.get(name)
        return self._weights.get(name) if found is None else found


def _borrowing(
    raw: dict[str, Any],
    shape: ModelConfig,
    weights: checkpoints.Weights,
    folder: Path,
    target: LoadedModel,
) -> tuple[ModelConfig, TensorSource]:
    lender = target.model.config
    ours, theirs = (shape.hidden_size, shape.vocab_size), (lender.hidden_size, lender.vocab_size)
    if ours != theirs:
        raise CheckpointError(
            f"{folder} shares the embedding of {raw[SHARES]}, [{ours[1]}, {ours[0]}]; that of"
            f" {target.name} is [{theirs[1]}, {theirs[0]}]"
        )
    embedding, head = target_embedding(target), target_head(target)
    if VOCABULARY in weights:
        vocabulary = weights.get(VOCABULARY)
        check_vocabulary(folder, vocabulary, lender.vocab_size)
        head = head[vocabulary.long()]
    return dataclasses.replace(shape, is_tied=False), _Borrowing(weights, embedding, head)


def check_vocabulary(folder: Path, vocabulary: Tensor, vocab_size: int) -> None:
    """Raise CheckpointError unless these are ascending token ids of the target."""
    is_list = vocabulary.dim() == 1 and len(vocabulary) > 0
    ids = vocabulary.long()
    if (
        not is_list
        or int(ids[0]) < 0
        or int(ids[-1]) >= vocab_size
        or bool((ids.diff() <= 0).any())
    ):
        raise CheckpointError(
            f"{folder}: tensor {VOCABULARY} must hold ascending token ids below {vocab_size}"
        )


def target_embedding(target: LoadedModel) -> Tensor:
    """The target's embedding as its checkpoint has it [vocab, hidden]."""
    return checkpoints.open_weights(checkpoints.resolve(target.name)).get(EMBEDDING)


def target_head(target: LoadedModel) -> Tensor:
    """The target's output projection as its checkpoint has it [vocab, hidden]."""
    weights = checkpoints.open_weights(checkpoints.resolve(target.name))
    return weights.get(EMBEDDING if target.model.config.is_tied else HEAD)


def _precision(config: EngineConfig) -> Any:
    """A target of integers still has a draft model of floats: there is little to read."""
    return "auto" if config.weights in ("int8", "int4") else config.weights


def _check_tokenizers(folder: Path, target: LoadedModel) -> None:
    """Refuse a draft model whose tokens mean something else."""
    if target.tokenizer is None:
        return
    own = Tokenizer.load(folder)
    difference = own.first_difference(target.tokenizer)
    if difference is not None:
        token_id, ours, theirs = difference
        raise UsageError(
            f"the draft model {folder} has another tokenizer than {target.name}: token {token_id}"
            f" is {ours!r} there and {theirs!r} in the target; take a draft model of its family"
        )
