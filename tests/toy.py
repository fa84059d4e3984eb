"""Toy models: tiny random decoders, a character tokenizer, and adversarial drafters."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from specdec.builtin_model import cache_folder
from specdec.config import Backend, EngineConfig, KVPrecision, WeightPrecision
from specdec.controller import Controller
from specdec.drafting import Drafter
from specdec.engine import Engine
from specdec.kernels import native_library
from specdec.loading import LoadedModel, load_target
from specdec.model_config import ModelConfig
from specdec.plan import DecodeStep
from specdec.request import Request, RequestOutput
from specdec.tokenizer import Tokenizer
from specdec.tree import DraftTree, TreeBuilder

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
    """Random weights by name, large enough that the next token is rarely a near tie.

    Asked for in any order they are the same: backends load them in orders of their own.
    """

    def __init__(self, config: Mapping[str, Any], seed: int, gain: float = 2.5) -> None:
        self._config, self._seed, self._gain = config, seed, gain

    def get(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed << 32 | zlib.crc32(name.encode()))
        c = self._config
        hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        rows_q, rows_kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
        if "norm" in name:
            return 1.0 + 0.1 * torch.randn(hidden, generator=generator)
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
        noise = torch.randn(shape, generator=generator)
        weight: Tensor = self._gain * noise / shape[1] ** 0.5
        return weight


@dataclass(frozen=True)
class Form:
    """What computes the toy target, and the precisions of its weights and its KV cache."""

    backend: Backend = "torch"
    weights: WeightPrecision = "fp32"
    kv: KVPrecision = "auto"

    def __str__(self) -> str:
        kv = () if self.kv == "auto" else (self.kv,)
        return "-".join((self.backend, self.weights, *kv))


_default_form = Form()


@contextmanager
def default_form(form: Form) -> Iterator[None]:
    """Inside, `toy_model` and `toy_engine` take this form unless they are told another.

    Raises UsageError where the form cannot be had.
    """
    global _default_form
    before = _default_form
    _default_form = form
    try:
        toy_model()
        yield
    finally:
        _default_form = before


def toy_model(form: Form | None = None) -> LoadedModel:
    """A random two-layer Llama over ALPHABET, the same in every form but for rounding."""
    form = form or _default_form
    return _toy_model(form.backend, form.weights)


@cache
def _toy_model(backend: Backend, weights: WeightPrecision) -> LoadedModel:
    shape = ModelConfig.from_checkpoint(CONFIG)
    config = EngineConfig(backend=backend, weights=weights, threads=1)
    target = load_target(config, shape, RandomTensors(CONFIG, 0), shape.max_position)
    return LoadedModel(target, toy_tokenizer(), (EOS,), "toy", shape.max_position)


def compiled_native() -> Path:
    """The folder of the compiled native forward, so that no command under test has to compile it.

    It is empty where it cannot be compiled.
    """
    folder = cache_folder() / "native"
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(native_library.NativeUnavailable):
        native_library.load(folder)
    return folder


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
    controller: Controller | None = None,
    drafter_name: str = "none",
    num_blocks: int | None = None,
    **settings: Any,
) -> Engine:
    """An engine over the toy model; `num_blocks` makes the KV cache that small."""
    form = _default_form
    loaded = model or toy_model(form)
    settings = {
        "drafter": drafter_name,
        "control": "fixed",
        "block_size": 16,
        "kv_memory_mib": 4,
        "backend": form.backend,
        "kv": form.kv,
        **settings,
    }
    config = EngineConfig(**settings)
    engine = Engine(config, loaded=loaded, drafter=drafter, controller=controller)
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


class TruthDrafter(Drafter):
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
