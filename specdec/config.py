"""EngineConfig: every setting of the engine, frozen and validated once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from specdec.errors import UsageError

Verification = Literal["coupled", "rejection", "typical"]
DType = Literal["auto", "bf16", "fp16", "fp32"]
KVDType = Literal["auto", "fp8"]

DEFAULT_MODEL = "smollm2-135m-instruct"
MAX_NODE_BUDGET = 255  # a tree is at most 256 nodes, root included: four 64-bit ancestor words


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    Sizes are in tokens unless the name says otherwise. `token_budget` bounds the query tokens of
    a step: decodes come first, prefill chunks share what is left, so a long prompt never stalls a
    running stream for more than one step of that size. `kv_memory_mib` sizes the KV cache,
    `kv_dtype` "fp8" halves it on a GPU. `deterministic` makes a token's logits depend on its own
    path alone; the CPU always does, a GPU may be faster without.

    Example: `EngineConfig(drafter="ngram", node_budget=16)`.
    Raises UsageError when a value makes no sense.
    """

    model: str = DEFAULT_MODEL
    dtype: DType = "auto"
    device: str = "cpu"
    drafter: str = "ngram"
    node_budget: int = 16
    verification: Verification = "coupled"
    max_model_len: int | None = None
    token_budget: int = 256
    max_running: int = 64
    block_size: int = 32
    kv_memory_mib: int = 1024
    prefix_cache: bool = True
    kv_dtype: KVDType = "auto"
    deterministic: bool = True
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in get_args(DType):
            raise UsageError(f"unknown dtype {self.dtype!r}; choose from {_names(DType)}")
        if self.kv_dtype not in get_args(KVDType):
            raise UsageError(f"unknown KV dtype {self.kv_dtype!r}; choose from {_names(KVDType)}")
        if self.kv_dtype == "fp8" and self.device.startswith("cpu"):
            raise UsageError("an fp8 KV cache needs a GPU; use --kv-dtype auto")
        if self.verification not in get_args(Verification):
            raise UsageError(
                f"unknown verification {self.verification!r}; choose from {_names(Verification)}"
            )
        if not 0 <= self.node_budget <= MAX_NODE_BUDGET:
            raise UsageError(
                f"node budget must be between 0 and {MAX_NODE_BUDGET}, not {self.node_budget}"
            )
        num_cores = os.cpu_count() or 1
        if self.threads is not None and self.threads > num_cores:
            raise UsageError(f"threads must be at most {num_cores} here, not {self.threads}")
        if self.block_size < 16 or self.block_size % 16:
            raise UsageError(f"block size must be a multiple of 16, not {self.block_size}")
        for name, at_least in (
            ("token_budget", 1),
            ("max_running", 1),
            ("kv_memory_mib", 1),
            ("max_model_len", 2),
            ("threads", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < at_least:
                raise UsageError(
                    f"{name.replace('_', ' ')} must be at least {at_least}, not {value}"
                )


def _names(literal: object) -> str:
    return ", ".join(get_args(literal))
