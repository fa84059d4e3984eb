"""Reading a checkpoint: what config.json says, what is refused, and products packed for speed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.errors import CheckpointError, UnsupportedModel
from specdec.model_config import SUPPORTED, ModelConfig
from specdec.weights import ModelWeights, PackedLinear
from tests.toy import CONFIG, RandomTensors

CPU = torch.device("cpu")
REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_checkpoint({**CONFIG, **changes})


# --- what is refused ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*" + ".*".join(SUPPORTED)),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": []}, "supported: LlamaForCausalLM"),
        ({"architectures": None}, "supported: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "'gelu'.*supported: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised.*--weights int8"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*default, linear"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'.*llama3, yarn"),
    ],
)
def test_unsupported_models_are_refused_with_what_is_supported(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(**changes)


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field: str) -> None:
    config = {name: value for name, value in CONFIG.items() if name != field}
    with pytest.raises(CheckpointError, match=f"lacks '{field}'") as caught:
        ModelConfig.from_checkpoint(config)
    assert not isinstance(caught.value, UnsupportedModel)


@pytest.mark.parametrize(
    ("rule", "field"),
    [("linear", "factor"), *(("llama3", name) for name in LLAMA3 if name != "rope_type")],
)
def test_a_missing_rope_parameter_is_named(rule: str, field: str) -> None:
    """Not only when the tables are made, which is after gigabytes of weights were read."""
    scaling = {name: value for name, value in LLAMA3.items() if name != field}
    with pytest.raises(CheckpointError, match=f"lacks '{field}'"):
        read(rope_scaling={**scaling, "rope_type": rule})


@pytest.mark.parametrize("value", [None, "many", [3]])
def test_a_value_of_a_wrong_kind_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read(num_hidden_layers=value)


class Without:
    """Random weights less one tensor, and a record of what was asked for."""

    def __init__(self, missing: str | None = None) -> None:
        self._tensors = RandomTensors(CONFIG, seed=0)
        self._missing = missing
        self.asked: list[str] = []

    def get(self, name: str) -> Tensor:
        self.asked.append(name)
        if name == self._missing:
            raise CheckpointError(f"no tensor {name}")
        return self._tensors.get(name)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        ModelWeights.load(read(), Without(name), torch.float32, CPU)


def test_a_tied_model_needs_no_head() -> None:
    source = Without()
    ModelWeights.load(read(), source, torch.float32, CPU)
    assert "lm_head.weight" not in source.asked
    assert len(source.asked) == len(set(source.asked))
    untied = read(tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        ModelWeights.load(untied, Without("lm_head.weight"), torch.float32, CPU)


# --- what config.json says ---


@pytest.fixture
def _quiet() -> Iterator[None]:
    """transformers logs its doubts about the defaults, which do not fit this model's shape."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("architecture", SUPPORTED)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        {"sliding_window": None},
        {"head_dim": 32, "num_key_value_heads": 4},
        {"tie_word_embeddings": True},
    ],
)
def test_fields_left_out_mean_what_transformers_takes(
    architecture: str, changes: dict[str, Any]
) -> None:
    from transformers import AutoConfig

    fields = {name: CONFIG[name] for name in REQUIRED} | changes
    fields |= {"num_hidden_layers": 30, "num_attention_heads": 4}
    family = architecture.removesuffix("ForCausalLM").lower()
    want = AutoConfig.for_model(family, **fields)
    got = ModelConfig.from_checkpoint({"architectures": [architecture], **fields})
    kinds = getattr(want, "layer_types", None) or ["sliding_attention"] * 30
    window = None if family == "llama" else want.sliding_window
    assert got == dataclasses.replace(
        got,
        num_kv_heads=want.num_key_value_heads,
        head_dim=getattr(want, "head_dim", None) or want.hidden_size // 4,
        norm_eps=want.rms_norm_eps,
        max_position=want.max_position_embeddings,
        is_tied=want.tie_word_embeddings,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
    )
    assert got.rope.theta == want.rope_parameters["rope_theta"]
    assert got.rope.head_dim == got.head_dim
    assert got.rope.max_position == got.max_position


def test_layer_types_win_over_max_window_layers() -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = read(
        architectures=["Qwen3ForCausalLM"],
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
        layer_types=kinds,
    )
    assert config.windows == (7, None)


# --- products ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 31, 32, 33, 64, 70])
def test_a_packed_product_is_the_plain_one(
    num_rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    """Error at most twice that of `linear`, against fp64; and two ulps of the largest output."""
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(40, 96, generator=generator).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(num_rows, 96, generator=generator).to(dtype)
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    plain = (torch.nn.functional.linear(x, weight, bias) - exact).abs()
    got = PackedLinear(weight, bias)(x)
    assert got.dtype == dtype and got.shape == (num_rows, 40)
    if num_rows:
        ulp = torch.finfo(dtype).eps * exact.abs().max()
        assert (got - exact).abs().max() <= 2 * plain.max() + 2 * ulp


def test_fp16_computes_where_it_cannot_be_packed() -> None:
    weight, x = torch.randn(48, 32), torch.randn(3, 32)
    expected = x.half() @ weight.half().T
    torch.testing.assert_close(PackedLinear(weight.half())(x.half()), expected)


def test_bytes_are_those_of_the_embedding_and_all_products() -> None:
    config = read()
    weights = ModelWeights.load(config, RandomTensors(CONFIG, 1), torch.float32, CPU)
    hidden, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], config.vocab_size
    queries = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    keys = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * inner
    assert weights.num_bytes == 4 * (2 * vocab * hidden + CONFIG["num_hidden_layers"] * layer)


def test_of_biases_qwen2_has_those_of_queries_keys_and_values_whatever_it_says() -> None:
    for said in (True, False):
        config = read(architectures=["Qwen2ForCausalLM"], attention_bias=said)
        assert (config.has_qkv_bias, config.has_output_bias) == (True, False)
        config = read(attention_bias=said)
        assert (config.has_qkv_bias, config.has_output_bias) == (said, said)
