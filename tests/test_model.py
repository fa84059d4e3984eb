"""The target model's logits are those of transformers, for every family it implements."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor

from specdec import checkpoints
from specdec.config import Backend, EngineConfig
from specdec.loading import load_model, load_target
from specdec.model_config import ModelConfig
from specdec.model_runner import ModelRunner
from specdec.params import SamplingParams
from specdec.plan import DecodeStep, PrefillChunk, StepPlan
from specdec.request import Request
from specdec.target import Target
from specdec.tree import ROOT_SOURCE, DraftTree
from tests.toy import Form

VOCAB = 90
BLOCK = 16
ATOL = 1e-4
MAX_LEN = 160
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = 20  # neither the block size nor near the sequences' length


def rope(scaling: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, **scaling}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama-gqa": ("llama", rope({"rope_type": "default"}, 500000.0)),
    "llama3": ("llama", rope(LLAMA3, 500000.0)),
    "llama-linear": ("llama", rope({"rope_type": "linear", "factor": 2.5})),
    "llama-yarn": ("llama", rope(YARN)),
    "llama-yarn-factor": ("llama", rope({**YARN, "factor": 16.0, "attention_factor": 0.8})),
    "llama-yarn-mscale": ("llama", rope({**YARN, "mscale": 0.7, "mscale_all_dim": 1.5})),
    "llama-yarn-ramp": ("llama", rope({**YARN, "beta_fast": 8.0, "truncate": False})),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "smollm2": (
        "llama",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            **rope({"rope_type": "default"}, 100000.0),
        },
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen2-window-off": ("qwen2", {"sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32, "rms_norm_eps": 1e-6}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, **rope(YARN, 1e6)}),
    "qwen3-bias": ("qwen3", {"head_dim": 24, "attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _no_chatter() -> Iterator[None]:
    """transformers logs progress and its doubts about odd configs, which are wanted here."""
    from transformers.utils import logging as chatter

    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    chatter.disable_progress_bar()
    yield
    chatter.enable_progress_bar()
    logger.setLevel(before)


def save(folder: Path, family: str, fields: dict[str, Any], max_shard_size: str = "1GB") -> None:
    """A checkpoint with seeded weights, large enough that logits are far from uniform."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**BASE, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + noise if "norm" in name else noise)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def rewrite_in_old_style(folder: Path, fields: dict[str, Any]) -> None:
    """config.json as before version 5, with the window stated even where it is not used."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    rule = scaling.pop("rope_type")
    config["rope_scaling"] = None if rule == "default" else {"type": rule, **scaling}
    config.pop("layer_types", None)
    config["sliding_window"] = fields.get("sliding_window")
    path.write_text(json.dumps(config))


def load(folder: Path, backend: Backend = "torch") -> Target:
    shape = ModelConfig.from_checkpoint(checkpoints.load_config(folder))
    config = EngineConfig(weights="fp32", backend=backend, threads=1)
    return load_target(config, shape, checkpoints.open_weights(folder), MAX_LEN)


class Expected:
    """transformers on the same folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logits(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """Logits after the last token of each path [num_paths, vocab]."""
        longest = max(map(len, paths))
        ids = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths])
        rows = self._model(ids, use_cache=False).logits  # causal: padding after changes nothing
        picked: Tensor = rows[torch.arange(len(paths)), torch.tensor([len(p) - 1 for p in paths])]
        return picked


class Session:
    """One request driven by hand beside a neighbour, over a scattered block table."""

    def __init__(self, model: Target, token_ids: Sequence[int], seed: int) -> None:
        cache = model.make_kv_cache("fp32", num_blocks=24, block_size=BLOCK)
        self._runner = ModelRunner(model, cache)
        blocks = random.Random(seed).sample(range(24), 24)
        self.request = Request("r", tuple(token_ids), SamplingParams(seed=0))
        self.request.block_ids = blocks[:10]
        self._neighbour = Request("n", (5, 4, 3, 2, 1), SamplingParams(seed=0))
        self._neighbour.block_ids = blocks[10:]

    def prefill(self, start: int, end: int) -> None:
        chunks = (
            PrefillChunk(self._neighbour, 1, 3),
            PrefillChunk(self.request, start, end),
        )
        batch = self._runner.pack(StepPlan(chunks, ()), [])
        assert self._runner.forward(batch).logits.shape == (0, self._runner.model.config.vocab_size)

    def decode(self, tree: DraftTree, chunk: tuple[int, int] | None = None) -> Tensor:
        """Logits of each node; the last prefill chunk may come in the same step."""
        chunks = (PrefillChunk(self.request, *chunk),) if chunk else ()
        steps = (DecodeStep(self._neighbour, 0), DecodeStep(self.request, tree.num_nodes - 1))
        trees = [DraftTree.root_only(1), tree]
        batch = self._runner.pack(StepPlan(chunks, steps), trees)
        logits = self._runner.forward(batch).logits.clone()
        return logits[batch.first_logit[1] : batch.first_logit[2]]


def random_tree(root: int, num_nodes: int, seed: int) -> DraftTree:
    rng = random.Random(seed)
    parents = (-1, *(rng.randrange(max(0, node - 6), node) for node in range(1, num_nodes)))
    token_ids = (root, *(rng.randrange(VOCAB) for _ in range(1, num_nodes)))
    return DraftTree(token_ids, parents, (0.0,) * num_nodes, ((ROOT_SOURCE,),) * num_nodes)


def chain(token_ids: Sequence[int]) -> DraftTree:
    paths = [token_ids[1:]]
    return DraftTree.from_paths(token_ids[0], paths, source="test", node_budget=len(token_ids))


def compare(model: Target, expected: Expected) -> None:
    """Uneven prefill chunks, decoding token by token, a chain, and trees at two places."""
    rng = random.Random(3)
    tokens = [rng.randrange(VOCAB) for _ in range(60)]
    prompt = tokens[:43]
    session = Session(model, prompt, seed=5)
    for start, end in ((0, 5), (5, 6), (6, 39)):
        session.prefill(start, end)
    got = [session.decode(DraftTree.root_only(prompt[-1]), chunk=(39, 42))]
    paths = [list(prompt)]
    for token in tokens[43:50]:
        session.request.token_ids.append(token)
        got.append(session.decode(DraftTree.root_only(token)))
        paths.append(list(session.request.token_ids))
    known = session.request.token_ids
    drafts = [chain(tokens[49:]), random_tree(tokens[49], 45, seed=1)]
    drafts.append(random_tree(tokens[49], 7, seed=2))  # overwrites the slots of those before
    for tree in drafts:
        got.append(session.decode(tree))
        for node in range(tree.num_nodes):
            paths.append(known[:-1] + [tree.token_ids[n] for n in tree.path(node)])
    want = expected.logits(paths)
    assert want.std(1).min() > 0.5  # far from uniform
    torch.testing.assert_close(torch.cat(got), want, rtol=0, atol=ATOL)


# The native forward has heads of multiples of 16.
WITH_BACKENDS = [(Form("torch"), name) for name in CASES]
WITH_BACKENDS += [
    (Form("native"), name) for name, (_, f) in CASES.items() if f.get("head_dim", 16) % 16 == 0
]


@pytest.mark.parametrize(("backend", "name"), WITH_BACKENDS, indirect=["backend"], ids=str)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, backend: Form) -> None:
    family, fields = CASES[name]
    save(tmp_path, family, fields)
    model = load(tmp_path, backend.backend)
    assert model.config.is_tied == fields.get("tie_word_embeddings", False)
    if "window" in name and not name.endswith("off"):
        first = fields.get("max_window_layers", 0)
        assert model.config.windows == (None,) * first + (WINDOW,) * (3 - first)
    else:
        assert model.config.windows == (None,) * 3
    compare(model, Expected(tmp_path))


OLD_STYLE = ["llama2", "llama3", "llama-linear", "llama-yarn-factor", "mistral-window"]
OLD_STYLE += ["qwen2", "qwen2-window", "qwen2-window-off", "qwen3-tied"]


@pytest.mark.parametrize("name", OLD_STYLE)
def test_old_configs_mean_the_same(name: str, tmp_path: Path) -> None:
    """Most checkpoints state `rope_theta` and `rope_scaling`, and no `layer_types`."""
    family, fields = CASES[name]
    save(tmp_path, family, fields)
    rewrite_in_old_style(tmp_path, fields)
    compare(load(tmp_path), Expected(tmp_path))


@pytest.mark.parametrize("name", ["llama-biases", "smollm2"])
def test_sharded_checkpoints(name: str, tmp_path: Path) -> None:
    save(tmp_path, *CASES[name], max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    compare(load(tmp_path), Expected(tmp_path))


def test_padded_vocabulary(tmp_path: Path, backend: Form) -> None:
    """Embeddings are often padded beyond the tokenizer's last token; logits keep full width."""
    save(tmp_path, "qwen2", {"tie_word_embeddings": True})
    words = {f"w{index}": index for index in range(VOCAB - 30)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words)).save(str(tmp_path / "tokenizer.json"))
    config = EngineConfig(
        model=str(tmp_path), weights="fp32", backend=backend.backend, max_model_len=MAX_LEN
    )
    loaded = load_model(config)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.vocab_size == VOCAB - 30 < loaded.model.config.vocab_size
    compare(loaded.model, Expected(tmp_path))
