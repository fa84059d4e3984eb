"""Precision: what `--weights auto` stands for, the fastest precision that loses nothing.

A checkpoint that was made from integers has them beside it (specdec/gguf_conversion.py). Its bf16
weights are those integers rounded once more, so taking the integers as they are loses no more than
bf16 does, and reads less memory. Which is faster depends on the processor, so both are timed.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec import machine_cache
from specdec.batch_builder import BatchBuilder
from specdec.config import EngineConfig, WeightPrecision
from specdec.gguf_conversion import GROUP_BYTES
from specdec.kernels.native_library import GROUP
from specdec.model_config import ModelConfig
from specdec.native_model import NativeModel
from specdec.target import Target

_KIND = "precision"
_FORMAT = 1
_ROWS = (1, 4, 16)  # one stream, one with drafts, a crowd
_CONTEXT = 256
_REPEATS = 15
_MIN_GAIN = 1.05  # below it the simpler precision stays

_log = logging.getLogger(__name__)

Loader = Callable[[WeightPrecision], Target]


class Tensors(Protocol):
    """Tensors by name; `checkpoints.Weights`."""

    def names(self) -> frozenset[str]:
        """Of all tensors."""

    def get(self, name: str) -> Tensor:
        """One of them."""


def resolve_precision(weights: WeightPrecision, device: torch.device) -> str:
    """The weights' precision; `auto` is bf16 where the processor multiplies bf16 natively."""
    if weights != "auto":
        return weights
    if device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        return "fp32"
    return "bf16"


def own_integers(weights: Tensors, integers: Tensors | None) -> WeightPrecision | None:
    """The precision that takes a checkpoint's own integers throughout, None if there is none.

    With int4 the embedding and the head are int8, as in `NativeWeights`.
    """
    matrices = [name for name in weights.names() if weights.get(name).dim() == 2]
    if integers is None or not integers.names() >= set(matrices):
        return None

    def fits(precision: WeightPrecision) -> bool:
        for name in matrices:
            is_layer = name.startswith("model.layers.")
            kind = precision if is_layer else "int8"
            groups = weights.get(name).shape[1] // GROUP
            if integers.get(name).shape[1] != groups * GROUP_BYTES[kind]:
                return False
        return True

    return next((precision for precision in ("int4", "int8") if fits(precision)), None)


def load_fastest(
    load: Loader,
    integers: WeightPrecision | None,
    config: EngineConfig,
    shape: ModelConfig,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Target, str]:
    """The target in the faster precision, and why it is that one; "" where there was no choice.

    `integers` are what `own_integers` found. Measured once, then cached.
    """
    if integers is None:
        return load("auto"), ""
    identity = {
        "format": _FORMAT,
        "model": config.model,
        "shape": repr(shape),
        "integers": integers,
        "kv": config.kv,
        "backend": config.backend,
        "threads": config.threads,
        **machine_cache.machine_identity(torch.device(config.device)),
    }
    milliseconds = _known(machine_cache.load(_KIND, identity), integers)
    if milliseconds is None:
        whole = load("auto")
        if not isinstance(whole, NativeModel):  # PyTorch's forward has no integers
            return whole, ""
        small = load(integers)
        assert isinstance(small, NativeModel)  # as the other is
        targets = {whole.precision: whole, integers: small}
        milliseconds = _timed(targets, config, clock)
        machine_cache.save(_KIND, identity, milliseconds)
        best = _best(milliseconds, integers)
        return targets[best], _reason(milliseconds, best, integers)
    best = _best(milliseconds, integers)
    return load("auto" if best != integers else integers), _reason(milliseconds, best, integers)


def _timed(
    targets: Mapping[WeightPrecision, NativeModel], config: EngineConfig, clock: Callable[[], float]
) -> dict[WeightPrecision, list[float]]:
    """Milliseconds of a forward by precision, for each number of `_ROWS`; in turn.

    The least of each: whatever else runs only adds time, and what is cached must not rest on it.
    """
    times: dict[WeightPrecision, list[list[float]]] = {
        name: [[] for _ in _ROWS] for name in targets
    }
    num_blocks = -(-(_CONTEXT + max(_ROWS)) // config.block_size)
    caches = {
        name: target.make_kv_cache(config.kv, num_blocks=num_blocks, block_size=config.block_size)
        for name, target in targets.items()
    }
    for cache in caches.values():
        cache.scrub(range(num_blocks))  # pages never written are one page of zeros
    for _ in range(_REPEATS):
        for index, num_rows in enumerate(_ROWS):
            builder = BatchBuilder(config.block_size)
            builder.add(range(num_blocks), [0] * num_rows, _CONTEXT, wanted=range(num_rows))
            batch = builder.build()
            for name, target in targets.items():
                started = clock()
                target.forward(batch, caches[name])
                times[name][index].append(1e3 * (clock() - started))
    return {name: [min(runs) for runs in rows] for name, rows in times.items()}


def _best(
    milliseconds: Mapping[WeightPrecision, Sequence[float]], integers: WeightPrecision
) -> WeightPrecision:
    """The integers where they gain over the numbers of rows, in the geometric mean."""
    (whole,) = milliseconds.keys() - {integers}
    ratios = [
        math.log(before / after)
        for before, after in zip(milliseconds[whole], milliseconds[integers], strict=True)
    ]
    return integers if statistics.fmean(ratios) > math.log(_MIN_GAIN) else whole


def _reason(
    milliseconds: Mapping[WeightPrecision, Sequence[float]],
    best: WeightPrecision,
    integers: WeightPrecision,
) -> str:
    """Example: `int4 weights, which the checkpoint was made from: 3.6 ms a step, bf16 7.5`."""
    (other,) = milliseconds.keys() - {best}
    whose = ", which the checkpoint was made from" if best == integers else ""
    return (
        f"{best} weights{whose}: {milliseconds[best][0]:.1f} ms a step, "
        f"{other} {milliseconds[other][0]:.1f}"
    )


def _known(kept: Any, integers: WeightPrecision) -> dict[WeightPrecision, list[float]] | None:
    """What the cache holds, if it is what `_timed` gives."""
    try:
        found = {name: [float(value) for value in values] for name, values in kept.items()}
    except (AttributeError, TypeError, ValueError):
        return None
    is_whole = len(found) == 2 and integers in found
    is_sane = all(len(v) == len(_ROWS) and min(v) > 0 for v in found.values())
    return found if is_whole and is_sane else None
