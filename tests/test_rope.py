"""RoPE tables: those of transformers for every scaling rule, in either form of config.json."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import UnsupportedModel
from specdec.rope import RopeConfig

LENGTH = 700
MAX_POSITION = 512

factors = st.floats(1.0, 40.0)
yarn = st.fixed_dictionaries(
    {"rope_type": st.just("yarn"), "factor": factors},
    optional={
        "original_max_position_embeddings": st.integers(32, 512),
        "attention_factor": st.none() | st.floats(0.5, 2.0),
        "mscale": st.floats(0.1, 2.0),
        "mscale_all_dim": st.floats(0.1, 2.0),
        "beta_fast": st.none() | st.floats(8.0, 64.0),
        "beta_slow": st.none() | st.floats(0.5, 8.0),
        "truncate": st.booleans(),
    },
)
llama3 = st.fixed_dictionaries(
    {
        "rope_type": st.just("llama3"),
        "factor": factors,
        "low_freq_factor": st.floats(0.5, 2.0),
        "high_freq_factor": st.floats(3.0, 8.0),
    },
    optional={"original_max_position_embeddings": st.integers(32, 512)},
)
linear = st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors})
rules = st.one_of(st.just({"rope_type": "default"}), linear, llama3, yarn, yarn)


@pytest.fixture(autouse=True, scope="module")
def _no_advice() -> Iterator[None]:
    """transformers logs its doubts about odd combinations, which are wanted here."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def transformers_tables(
    scaling: dict[str, Any], theta: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [LENGTH, head_dim] as LlamaForCausalLM uses them."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(LENGTH)[None])
    return cos[0], sin[0]


@settings(max_examples=100, deadline=None)
@given(
    scaling=rules,
    theta=st.sampled_from([500.0, 10000.0, 500000.0, 1000000.0]),
    head_dim=st.sampled_from([16, 64, 80, 128]),
    is_new=st.booleans(),
)
def test_tables_are_those_of_transformers(
    scaling: dict[str, Any], theta: float, head_dim: int, is_new: bool
) -> None:
    old_scaling = {"type" if key == "rope_type" else key: x for key, x in scaling.items()}
    fields: dict[str, Any] = (
        {"rope_parameters": {"rope_theta": theta, **scaling}}
        if is_new
        else {"rope_theta": theta, "rope_scaling": old_scaling}
    )
    rope = RopeConfig.from_checkpoint({"max_position_embeddings": MAX_POSITION, **fields}, head_dim)
    cos, sin = rope.tables(LENGTH)
    want_cos, want_sin = transformers_tables(scaling, theta, head_dim)
    want_sin[:, : head_dim // 2] *= -1  # our table carries the sign of the rotation
    # Both round the frequency, then position x frequency: two half-ulps of an angle of 700 each.
    atol = 4 * LENGTH * torch.finfo(torch.float32).eps
    torch.testing.assert_close(cos, want_cos, rtol=0, atol=atol)
    torch.testing.assert_close(sin, want_sin, rtol=0, atol=atol)


def test_no_scaling_is_written_in_many_ways() -> None:
    ways: list[dict[str, Any]] = [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ]
    want = RopeConfig.from_checkpoint(ways[0], 16).tables(50)
    base = 5e5 ** -(torch.arange(8, dtype=torch.float64) / 8)
    torch.testing.assert_close(want[0][:, :8], (torch.arange(50)[:, None] * base).cos().float())
    for way in ways[1:]:
        assert all(map(torch.equal, RopeConfig.from_checkpoint(way, 16).tables(50), want))
    absent = RopeConfig.from_checkpoint({}, 16).tables(50)
    stated = RopeConfig.from_checkpoint({"rope_theta": 1e4}, 16).tables(50)
    assert all(map(torch.equal, absent, stated))


def test_a_longer_table_begins_with_the_shorter() -> None:
    """Else a request's logits would depend on --max-model-len."""
    rope = RopeConfig.from_checkpoint({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 64)
    for short, long in zip(rope.tables(37), rope.tables(1000), strict=True):
        assert torch.equal(short, long[:37])


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("rule", ["dynamic", "longrope", "mrope"])
def test_an_unknown_rule_is_refused(key: str, rule: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"'{rule}'.*default, linear, llama3, yarn"):
        RopeConfig.from_checkpoint({"rope_scaling": {key: rule, "factor": 2.0}}, 16)
