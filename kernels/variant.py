"""Variant: one compiled form of a Triton kernel, stated well enough to build it without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A kernel with its argument types and compile-time constants.

    `signature` names each run-time argument's type as Triton writes it ("*bf16", "i32", "fp32");
    `constants` are the compile-time ones, those in capitals. `options` are launch options such as
    num_warps, num_stages or enable_fp_fusion. Pointers are taken to be 16-byte aligned, and so are
    the integers in `multiples_of_16`. A hot variant runs in every decode step and must not spill.

    Example: `Variant("rms_norm bf16 4096", _rms_norm, {"x": "*fp32", ...}, {"BLOCK": 4096})`.
    """

    name: str
    kernel: Any  # triton.JITFunction, which has no type
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    amd_options: Mapping[str, Any] = field(default_factory=dict)  # what differs on AMD targets
    multiples_of_16: tuple[str, ...] = ()
    is_hot: bool = True
    targets: tuple[str, ...] = ()  # where it is used, as `aot` names them; empty = everywhere
