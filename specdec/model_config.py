"""ModelConfig: the few numbers that tell one Llama-family decoder from another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import CheckpointError, UnsupportedModel
from specdec.rope import RopeConfig

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# What transformers takes for a field that a config.json leaves out.
_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": {**_QWEN, "head_dim": 128},
}


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the target model. `window` is the sliding window per layer, None = full."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position: int
    is_tied: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    windows: tuple[int | None, ...]

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a checkpoint's config.json.

        Raises UnsupportedModel naming what is supported, CheckpointError for a missing field.
        Example: `ModelConfig.from_checkpoint(checkpoints.load_config(folder))`.
        """
        architecture = next(iter(config.get("architectures") or ["?"]))
        if architecture not in SUPPORTED:
            raise UnsupportedModel(
                f"architecture {architecture} is not supported; supported: {', '.join(SUPPORTED)}"
            )
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModel(f"activation {activation!r} is not supported; supported: silu")
        if config.get("quantization_config"):
            raise UnsupportedModel(
                "quantised checkpoints are not supported; take the unquantised one, and give"
                " --weights int8 or int4 if it should be small"
            )
        try:
            return cls._read(architecture, {**_DEFAULTS[architecture], **config})
        except KeyError as error:
            raise CheckpointError(f"config.json lacks {error.args[0]!r}") from None
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"config.json holds a value of a wrong kind: {error}") from None

    @classmethod
    def _read(cls, architecture: str, config: Mapping[str, Any]) -> ModelConfig:
        num_heads = int(config["num_attention_heads"])
        hidden_size = int(config["hidden_size"])
        num_layers = int(config["num_hidden_layers"])
        head_dim = int(config.get("head_dim") or hidden_size // num_heads)
        is_qwen2, is_qwen3 = architecture.startswith("Qwen2"), architecture.startswith("Qwen3")
        has_bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=head_dim,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_checkpoint(config, head_dim),
            max_position=int(config.get("max_position_embeddings", 2048)),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            has_qkv_bias=is_qwen2 or has_bias,
            has_output_bias=has_bias and not is_qwen2,
            has_mlp_bias=bool(config.get("mlp_bias", False)),
            has_qk_norm=is_qwen3,
            windows=_windows(architecture, config, num_layers),
        )


def _windows(
    architecture: str, config: Mapping[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window or architecture.startswith("Llama"):
        return (None,) * num_layers
    if architecture.startswith("Mistral"):
        return (int(window),) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config["max_window_layers"])
        return tuple(int(window) if layer >= first else None for layer in range(num_layers))
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
