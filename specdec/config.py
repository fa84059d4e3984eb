"""EngineConfig: every setting of the engine, frozen and validated once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from specdec.errors import UsageError
from specdec.limits import MAX_NODE_BUDGET

Verification = Literal["coupled", "rejection", "typical"]
WeightPrecision = Literal["auto", "bf16", "fp16", "fp32", "int8", "int4"]
KVPrecision = Literal["auto", "bf16", "fp32", "int8", "fp8"]
Backend = Literal["auto", "native", "torch"]
Control = Literal["adaptive", "fixed"]

MAX_TOKEN_BUDGET, MAX_RUNNING = 16384, 4096  # of a step: more only costs memory and waiting
DEFAULT_MODEL = "smollm2-135m-instruct"
AUTO = "auto"


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    Sizes are in tokens unless the name says otherwise. `token_budget` bounds the query tokens of
    a step: decodes come first, prefill chunks share what is left, so a long prompt never stalls a
    running stream for more than one step of that size. `kv_memory_mib` is for the KV cache and
    what drafters hold.

    `weights` and `kv` are precisions; with int8 or int4 weights the target is the quantised model,
    for plain and speculative decoding alike. fp16 weights and an fp8 KV cache are a GPU's, integer
    weights and an int8 KV cache the native CPU forward's. `backend` chooses that forward (C++,
    compiled at first use) or plain PyTorch; auto takes the former where there is a compiler.
    `deterministic` makes a token's logits depend on its own path alone; the CPU always does, a GPU
    may be faster without.

    `drafter` names one drafter or several, separated by commas: docs/drafters.md. What is left open
    is settled when the model is loaded, by what steps cost on this machine: `weights="auto"` by
    specdec/precision.py, `drafter="auto"` and no node budget by specdec/composition.py.

    `control` decides how many of the at most `node_budget` nodes per request are verified:
    adaptive, as many as pay by measured cost and acceptance, or fixed, always all of them.
    `latency_weight` tells adaptive control what to better: 0 the tokens per second of the whole
    batch, 1 the mean time per token over its streams (docs/control.md).

    Example: `EngineConfig(drafter="suffix,medusa", node_budget=16)`.
    Raises UsageError when a value makes no sense.
    """

    model: str = DEFAULT_MODEL
    weights: WeightPrecision = "auto"
    device: str = "cpu"
    drafter: str = AUTO
    node_budget: int | None = None
    control: Control = "adaptive"
    latency_weight: float = 0.0
    verification: Verification = "coupled"
    max_model_len: int | None = None
    token_budget: int = 256
    max_running: int = 64
    block_size: int = 32
    kv_memory_mib: int = 1024
    prefix_cache: bool = True
    kv: KVPrecision = "auto"
    backend: Backend = "auto"
    deterministic: bool = True
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("weights", WeightPrecision),
            ("kv", KVPrecision),
            ("backend", Backend),
            ("verification", Verification),
            ("control", Control),
        ):
            if getattr(self, name) not in get_args(choices):
                raise UsageError(
                    f"unknown {name} {getattr(self, name)!r}; choose from {_names(choices)}"
                )
        self._check_device()
        if self.node_budget is not None and not 0 <= self.node_budget <= MAX_NODE_BUDGET:
            raise UsageError(
                f"node budget must be between 0 and {MAX_NODE_BUDGET}, not {self.node_budget}"
            )
        if not 0 <= self.latency_weight <= 1:
            raise UsageError(f"latency weight must be between 0 and 1, not {self.latency_weight}")
        num_cores = os.cpu_count() or 1
        if self.threads is not None and self.threads > num_cores:
            raise UsageError(f"threads must be at most {num_cores} here, not {self.threads}")
        if self.block_size < 16 or self.block_size % 16:
            raise UsageError(f"block size must be a multiple of 16, not {self.block_size}")
        for name, at_least, at_most in (
            ("token_budget", 1, MAX_TOKEN_BUDGET),
            ("max_running", 1, MAX_RUNNING),
            ("kv_memory_mib", 1, None),
            ("max_model_len", 2, None),
            ("threads", 1, None),
        ):
            value, words = getattr(self, name), name.replace("_", " ")
            if value is not None and value < at_least:
                raise UsageError(f"{words} must be at least {at_least}, not {value}")
            if value is not None and at_most is not None and value > at_most:
                raise UsageError(f"{words} must be at most {at_most}, not {value}")

    def _check_device(self) -> None:
        """Refuse what the device or the backend does not have."""
        on_cpu = self.device.startswith("cpu")
        if on_cpu and self.kv == "fp8":
            raise UsageError("an fp8 KV cache needs a GPU; use --kv auto")
        if on_cpu and self.weights == "fp16" and self.backend != "torch":
            raise UsageError("fp16 weights need a GPU or --backend torch; use --weights auto")
        if on_cpu and self.backend != "torch":
            return
        where = "on a CPU by --backend native" if on_cpu else "on a CPU"
        if self.weights in ("int8", "int4"):
            raise UsageError(f"{self.weights} weights are served {where} only; use --weights auto")
        if self.kv in ("int8", "bf16" if on_cpu else "fp32"):
            raise UsageError(f"an {self.kv} KV cache is served {where} only; use --kv auto")
        if not on_cpu and self.backend == "native":
            raise UsageError("the native backend is a CPU's; use --backend auto")


def _names(literal: object) -> str:
    return ", ".join(get_args(literal))
