"""Every setting that makes no sense is one clear error that names it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specdec.config import EngineConfig
from specdec.drafting import available_drafters, parse_drafters
from specdec.errors import UsageError
from specdec.limits import MAX_NODE_BUDGET
from tests.toy import toy_engine


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("weights", "int3", "auto, bf16, fp16, fp32, int8, int4"),
        ("kv", "int3", "auto, bf16, fp32, int8, fp8"),
        ("backend", "onnx", "auto, native, torch"),
        ("verification", "hopeful", "coupled, rejection, typical"),
        ("node_budget", -1, "between 0 and 255, not -1"),
        ("node_budget", MAX_NODE_BUDGET + 1, "not 256"),
        ("block_size", 0, "multiple of 16, not 0"),
        ("block_size", 8, "multiple of 16, not 8"),
        ("block_size", 40, "multiple of 16, not 40"),
        ("block_size", -16, "multiple of 16, not -16"),
        ("token_budget", 0, "at least 1, not 0"),
        ("max_running", 0, "at least 1, not 0"),
        ("kv_memory_mib", 0, "at least 1, not 0"),
        ("max_model_len", 1, "at least 2, not 1"),
        ("threads", 0, "at least 1, not 0"),
    ],
)
def test_bad_value(name: str, value: Any, says: str) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(UsageError) as caught:
        EngineConfig(**settings)
    message = str(caught.value)
    assert name.replace("_", " ") in message and says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("node_budget", 0),
        ("node_budget", MAX_NODE_BUDGET),
        ("block_size", 16),
        ("token_budget", 1),
        ("max_running", 1),
        ("kv_memory_mib", 1),
        ("max_model_len", 2),
        ("threads", 1),
        ("max_model_len", None),
        ("threads", None),
    ],
)
def test_edges_are_allowed(name: str, value: Any) -> None:
    settings: dict[str, Any] = {name: value}
    assert getattr(EngineConfig(**settings), name) == value


def test_frozen_and_without_unknown_settings() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().node_budget = 3  # type: ignore[misc]  # what must fail
    settings: dict[str, Any] = {"node_budgt": 3}
    with pytest.raises(TypeError, match="node_budgt"):
        EngineConfig(**settings)


def test_unknown_drafter_names_the_choices() -> None:
    assert {"none", "ngram"} <= set(available_drafters())
    with pytest.raises(UsageError, match=r"unknown drafter 'psychic'; choose from .*ngram.*none"):
        parse_drafters("none,psychic")
    assert [(d.name, at) for d, at in parse_drafters("ngram=x,none")] == [
        ("ngram", "x"),
        ("none", None),
    ]
    with pytest.raises(UsageError, match="'ngram' is named twice"):
        parse_drafters("ngram, ngram=y")


def test_a_cache_too_small_for_one_context_says_how_much_is_needed() -> None:
    with pytest.raises(UsageError, match=r"1 MiB of KV cache cannot hold .* at least 4 MiB"):
        toy_engine(kv_memory_mib=1, block_size=8192)


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(UsageError, match="threads must be at most"):
        EngineConfig(threads=100_000)


def test_a_kv_cache_beyond_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="not to be had"):
        toy_engine(kv_memory_mib=10**10)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        # The reference writes fp32: an index of the CPU once got past this check.
        *(({"device": d, "kv": "fp8"}, "fp8 KV cache needs a GPU") for d in ("cpu", "cpu:0")),
        ({"backend": "torch", "kv": "fp8"}, "fp8 KV cache needs a GPU"),
        *(
            ({"backend": backend, "weights": "fp16"}, "fp16 weights need a GPU or --backend torch")
            for backend in ("auto", "native")
        ),
        *(
            ({"device": device, "weights": weights}, f"{weights} weights are served on a CPU only")
            for device in ("cuda", "cuda:1")
            for weights in ("int8", "int4")
        ),
        *(
            ({"device": "cuda", "kv": kv}, f"an {kv} KV cache is served on a CPU only")
            for kv in ("int8", "fp32")
        ),
        ({"device": "cuda", "backend": "native"}, "the native backend is a CPU's"),
        *(
            (
                {"backend": "torch", "weights": weights},
                f"{weights} weights are served on a CPU by --backend native only",
            )
            for weights in ("int8", "int4")
        ),
        *(
            (
                {"backend": "torch", "kv": kv},
                f"an {kv} KV cache is served on a CPU by --backend native only",
            )
            for kv in ("int8", "bf16")
        ),
    ],
)
def test_what_a_device_or_backend_does_not_have(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        EngineConfig(**settings)
    assert "; " in str(caught.value), "and what to do"


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "cuda", "weights": "fp16", "kv": "fp8"},
        {"device": "cuda", "weights": "bf16", "kv": "bf16", "backend": "torch"},
        {"device": "cpu:0", "weights": "int4", "kv": "int8", "backend": "native"},
        {"weights": "int8", "kv": "bf16"},
        {"weights": "fp16", "backend": "torch"},
        {"weights": "bf16", "kv": "fp32", "backend": "torch"},
    ],
)
def test_precisions_that_go_together(settings: dict[str, Any]) -> None:
    config = EngineConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings
