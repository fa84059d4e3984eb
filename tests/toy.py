"""Toy models: tiny random decoders, a character tokenizer, and adversarial drafters."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import tokenizers
import torch
from torch import Tensor

from specdec.config import EngineConfig
from specdec.drafting import Drafter
from specdec.engine import Engine
from specdec.loading import LoadedModel
from specdec.model import TargetModel
from specdec.model_config import ModelConfig
from specdec.plan import DecodeStep
from specdec.request import Request, RequestOutput
from specdec.tokenizer import Tokenizer
from specdec.tree import DraftTree, TreeBuilder
from specdec.verification import Verdict
from specdec.weights import ModelWeights

ALPHABET = "abcdefghijklmnopqrstuvwx"  # the last one is the end token
EOS = len(ALPHABET) - 1
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": len(ALPHABET),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "tie_word_embeddings": True,
}


class RandomTensors:
    """Random weights by name, large enough that the next token is rarely a near tie."""

    def __init__(self, config: Mapping[str, Any], seed: int, gain: float = 2.5) -> None:
        self._config, self._gain = config, gain
        self._generator = torch.Generator().manual_seed(seed)

    def get(self, name: str) -> Tensor:
        c = self._config
        hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        rows_q, rows_kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
        if "norm" in name:
            return 1.0 + 0.1 * torch.randn(hidden, generator=self._generator)
        shapes = {
            "embed_tokens": (c["vocab_size"], hidden),
            "q_proj": (rows_q, hidden),
            "k_proj": (rows_kv, hidden),
            "v_proj": (rows_kv, hidden),
            "o_proj": (hidden, rows_q),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        shape = shapes[name.split(".")[-2]]
        noise = torch.randn(shape, generator=self._generator)
        weight: Tensor = self._gain * noise / shape[1] ** 0.5
        return weight


@cache
def toy_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A random two-layer Llama over ALPHABET."""
    config = ModelConfig.from_checkpoint(CONFIG)
    weights = ModelWeights.load(config, RandomTensors(CONFIG, seed), dtype, torch.device("cpu"))
    return LoadedModel(
        TargetModel(config, weights, config.max_position),
        toy_tokenizer(),
        (EOS,),
        "toy",
        config.max_position,
    )


@cache
def toy_tokenizer() -> Tokenizer:
    """One token per letter."""
    vocab = {letter: index for index, letter in enumerate(ALPHABET)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, eos_token_ids=(EOS,))


def toy_engine(
    *,
    model: LoadedModel | None = None,
    drafter: Drafter | None = None,
    drafter_name: str = "none",
    num_blocks: int | None = None,
    **settings: Any,
) -> Engine:
    """An engine over the toy model; `num_blocks` makes the KV cache that small."""
    loaded = model or toy_model()
    settings = {"drafter": drafter_name, "block_size": 16, "kv_memory_mib": 4, **settings}
    engine = Engine(EngineConfig(**settings), loaded=loaded, drafter=drafter)
    if num_blocks is not None:
        spare = engine.pool.reserve(engine.pool.num_blocks - num_blocks)
        assert spare is not None
        engine.pool.check([spare])
        engine.spare = spare  # type: ignore[attr-defined]  # held for check_pool
    return engine


def check_pool(engine: Engine) -> None:
    """Conservation after a step."""
    held = [request.block_ids for request in engine.scheduler.requests]
    engine.pool.check([*held, getattr(engine, "spare", [])])


def run_all(engine: Engine, requests: Sequence[Request]) -> list[RequestOutput]:
    """Run requests to their end, checking the pool after every step."""
    for request in requests:
        engine.add(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        check_pool(engine)
    return outputs


class TruthDrafter:
    """Random trees that often hold the true continuation, in any place among its siblings.

    `truth` maps a request's id to the tokens it will output; what is not known is guessed.
    """

    name = "truth"

    def __init__(
        self,
        truth: Mapping[str, Sequence[int]],
        seed: int,
        hit_rate: float,
        vocab_size: int = len(ALPHABET),
    ) -> None:
        self._truth = truth
        self._random = random.Random(seed)
        self._hit_rate = hit_rate
        self._vocab_size = vocab_size

    def admit(self, request: Request) -> None: ...

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        return [self._draft(step) for step in steps]

    def _draft(self, step: DecodeStep) -> DraftTree:
        rng, num_output = self._random, len(step.request.output)
        truth = self._truth.get(step.request.request_id, ())
        builder = TreeBuilder(step.root, step.node_budget)
        depths, on_truth = [0], [True]
        while builder.room > 0 and rng.random() > 0.05:
            parent = rng.randrange(len(depths))
            index = num_output + depths[parent]
            is_hit = on_truth[parent] and index < len(truth) and rng.random() < self._hit_rate
            token_id = truth[index] if is_hit else rng.randrange(self._vocab_size)
            node = builder.add(parent, token_id, rng.random(), self.name)
            if node == len(depths):
                depths.append(depths[parent] + 1)
                on_truth.append(
                    on_truth[parent] and index < len(truth) and token_id == truth[index]
                )
        return builder.build()

    def observe(self, request: Request, verdict: Verdict) -> None: ...

    def release(self, request: Request) -> None: ...
