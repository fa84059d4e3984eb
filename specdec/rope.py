"""Rotary position embedding: the frequencies of each scaling rule, and the cos/sin tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.errors import UnsupportedModel


@dataclass(frozen=True)
class RopeConfig:
    """Base frequency and scaling rule, as a checkpoint's config.json states them."""

    theta: float
    rule: str
    scaling: Mapping[str, Any]
    head_dim: int
    max_position: int

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any], head_dim: int) -> RopeConfig:
        """Read `rope_theta` with `rope_scaling`, or the newer `rope_parameters`.

        Raises UnsupportedModel for a scaling rule that is not implemented, KeyError for a rule
        without its parameters.
        """
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rule = scaling.get("rope_type", scaling.get("type", "default"))
        if rule not in _INV_FREQ:
            raise UnsupportedModel(
                f"RoPE scaling {rule!r} is not supported; supported: {', '.join(_INV_FREQ)}"
            )
        theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
        max_position = int(config.get("max_position_embeddings", 2048))
        rope = cls(float(theta), rule, scaling, head_dim, max_position)
        rope.tables(1)  # a parameter that is missing shows here, before the weights are read
        return rope

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [0, length), fp32 [length, head_dim].

        `sin` is negative in the first half, as kernels.reference.rope wants it. A table, because
        cosines computed per batch could differ in the last bit with the batch's shape.
        """
        inv_freq, magnitude = _INV_FREQ[self.rule](self)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inv_freq)
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)


def _base(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
    return 1.0 / rope.theta**exponents


def _default(rope: RopeConfig) -> tuple[Tensor, float]:
    return _base(rope), 1.0


def _linear(rope: RopeConfig) -> tuple[Tensor, float]:
    return _base(rope) / float(rope.scaling["factor"]), 1.0


def _llama3(rope: RopeConfig) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, smooth between."""
    factor = float(rope.scaling["factor"])
    low, high = float(rope.scaling["low_freq_factor"]), float(rope.scaling["high_freq_factor"])
    trained = float(rope.scaling.get("original_max_position_embeddings") or rope.max_position)
    inv_freq = _base(rope)
    turns = trained * inv_freq / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / factor + blend * inv_freq, 1.0


def _yarn(rope: RopeConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): a ramp from interpolation to extrapolation, and attention scale."""
    s = rope.scaling
    trained = float(s.get("original_max_position_embeddings") or rope.max_position)
    factor = float(s.get("factor") or rope.max_position / trained)

    def magnitude(scale: float, coefficient: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * coefficient * math.log(scale) + 1.0

    def dim_of(turns: float) -> float:
        wavelength = trained / (turns * 2 * math.pi)
        return rope.head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = dim_of(float(s.get("beta_fast") or 32))
    high = dim_of(float(s.get("beta_slow") or 1))
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(rope.head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    inv_freq = _base(rope)
    if s.get("attention_factor") is not None:
        scale = float(s["attention_factor"])
    elif s.get("mscale") and s.get("mscale_all_dim"):
        scale = magnitude(factor, s["mscale"]) / magnitude(factor, s["mscale_all_dim"])
    else:
        scale = magnitude(factor)
    return inv_freq / factor * (1 - keep) + inv_freq * keep, scale


_INV_FREQ = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
