"""LoadedModel: from a model's name to weights, tokenizer and limits in memory."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specdec import checkpoints, native_choice, noise
from specdec.builtin_model import cache_folder
from specdec.config import EngineConfig, WeightPrecision
from specdec.errors import UsageError
from specdec.kernels import dispatch, native_library
from specdec.kernels.attention_group import ROW_TILE
from specdec.model import TargetModel
from specdec.model_config import ModelConfig
from specdec.native_model import NativeModel
from specdec.native_weights import IntegerSource
from specdec.precision import load_fastest, own_integers, resolve_precision
from specdec.row_invariance import PINNED_ROWS
from specdec.target import PagedCache, Target
from specdec.tokenizer import Tokenizer
from specdec.weights import ModelWeights, TensorSource

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class LoadedModel:
    """What an engine needs of a model; `tokenizer` is None for models without text.

    `reason` says why the weights are in this precision, where there was a choice.
    """

    model: Target
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    name: str
    max_model_len: int
    reason: str = ""


def load_model(config: EngineConfig) -> LoadedModel:
    """Resolve, read and pack a model.

    Raises CheckpointError, UnsupportedModel or UsageError with what to do.
    """
    device = _device(config.device)
    folder = checkpoints.resolve(config.model)
    raw_config = checkpoints.load_config(folder)
    model_config = ModelConfig.from_checkpoint(raw_config)
    objection = dispatch.objection(device, model_config.head_dim, config.block_size)
    if objection is not None:
        raise UsageError(objection)
    max_model_len = config.max_model_len or model_config.max_position
    if max_model_len > model_config.max_position:
        raise UsageError(
            f"max model len {max_model_len} exceeds the model's {model_config.max_position}"
        )
    with ThreadPoolExecutor(1) as pool:  # parsing the tokenizer costs a tenth of a second
        loading = pool.submit(Tokenizer.load, folder)
        try:
            model, reason = _load_target(config, model_config, folder, max_model_len)
        except torch.OutOfMemoryError:
            raise UsageError(f"the weights of {config.model} do not fit on {device}") from None
        tokenizer = loading.result()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids,
        name=config.model,
        max_model_len=max_model_len,
        reason=reason,
    )


def _load_target(
    config: EngineConfig, model_config: ModelConfig, folder: Path, max_model_len: int
) -> tuple[Target, str]:
    """The target in the precision that is asked for, or in the best one; and why."""
    weights, integers = checkpoints.open_weights(folder), checkpoints.open_integers(folder)

    def load(precision: WeightPrecision) -> Target:
        wanted = replace(config, weights=precision)
        return load_target(wanted, model_config, weights, max_model_len, integers)

    is_native = config.backend != "torch" and config.device.startswith("cpu")
    if config.weights != "auto" or not is_native:  # nothing else takes integers
        return load(config.weights), ""
    return load_fastest(load, own_integers(weights, integers), config, model_config)


def load_target(
    config: EngineConfig,
    model_config: ModelConfig,
    source: TensorSource,
    max_model_len: int,
    integers: IntegerSource | None = None,
    lender: Target | None = None,
) -> Target:
    """Pack the tensors of `source` for the backend that the configuration asks for or gets.

    The embedding is the `lender`'s where there is one of the same backend.
    """
    device = _device(config.device)
    library = native_forward(config, model_config)
    # The choice of nodes is on the CPU whatever runs the forward; it is not worth a compilation.
    native_choice.use_native(library or native_library.compiled(cache_folder() / "native"))
    if library is not None:
        noise.use_native(library)
        # What PyTorch still does between forwards is small. Its own threads would go on spinning
        # for milliseconds and take the cores from the forward's (docs/lab-log.md).
        torch.set_num_threads(1)
        return NativeModel(
            library,
            model_config,
            source,
            "bf16" if config.weights == "auto" else config.weights,
            max_model_len=max_model_len,
            num_threads=config.threads,
            integers=integers,
            lender=lender if isinstance(lender, NativeModel) else None,
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    dtype = _DTYPES[resolve_precision(config.weights, device)]
    lent = lender.weights if isinstance(lender, TargetModel) else None
    tile = _row_tile(config, device)
    weights = ModelWeights.load(model_config, source, dtype, device, tile, lent)
    return TargetModel(model_config, weights, max_model_len)


def native_forward(config: EngineConfig, model_config: ModelConfig) -> ctypes.CDLL | None:
    """The C++ forward where it serves this configuration, or None for PyTorch's.

    Where it is wanted and not to be had, says why on stderr, or raises UsageError if nothing else
    will do.
    """
    if config.backend == "torch" or not config.device.startswith("cpu"):
        return None
    needs = [
        option
        for option, is_native_only in (
            ("--backend native", config.backend == "native"),
            (f"--weights {config.weights}", config.weights in ("int8", "int4")),
            (f"--kv {config.kv}", config.kv in ("int8", "bf16")),
        )
        if is_native_only
    ]
    try:
        if model_config.head_dim % native_library.LANES:
            raise native_library.NativeUnavailable(
                f"heads of {model_config.head_dim} are not a multiple of {native_library.LANES}"
            )
        library = native_library.load(
            cache_folder() / "native",
            lambda: print(
                "specdec: compiling the CPU forward for this processor, once", file=sys.stderr
            ),
        )
        if not needs and not library.specdec_has_wide_registers():
            raise native_library.NativeUnavailable("it is made for processors with AVX-512")
    except native_library.NativeUnavailable as reason:
        if needs:
            raise UsageError(
                f"{' and '.join(needs)} needs the native CPU forward: {reason}; or leave it at auto"
            ) from None
        print(f"specdec: using PyTorch's slower forward: {reason}", file=sys.stderr)
        return None
    return library


def make_kv_cache(
    config: EngineConfig, model: Target, max_model_len: int, *, num_reserved_bytes: int = 0
) -> PagedCache:
    """A KV cache of the configured size, less what drafters take of it.

    Raises UsageError when it cannot hold one request of the longest context.
    """
    per_block = model.kv_bytes_per_block(config.kv, config.block_size)
    num_blocks = (config.kv_memory_mib * 2**20 - num_reserved_bytes) // per_block
    num_needed = -(-max_model_len // config.block_size)
    if num_blocks < num_needed:
        needed_mib = -(-(num_needed * per_block + num_reserved_bytes) // 2**20)
        beside = f" beside {num_reserved_bytes >> 20} MiB of drafters" if num_reserved_bytes else ""
        raise UsageError(
            f"{config.kv_memory_mib} MiB of KV cache cannot hold one context of {max_model_len} "
            f"tokens{beside}; give at least {needed_mib} MiB or a smaller max model len"
        )
    try:
        return model.make_kv_cache(config.kv, num_blocks=num_blocks, block_size=config.block_size)
    except (MemoryError, RuntimeError):  # numpy's word for it, and torch's
        raise UsageError(
            f"{config.kv_memory_mib} MiB of KV cache are not to be had; ask for less"
        ) from None


def _row_tile(config: EngineConfig, device: torch.device) -> int | None:
    """Rows that a matrix product may see at a time."""
    if device.type == "cpu":
        return ROW_TILE
    return PINNED_ROWS if config.deterministic else None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r}; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not supported; use cpu or cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise UsageError("no CUDA device is visible; use --device cpu")
        if (device.index or 0) >= count:
            raise UsageError(f"no device {name!r}; there are {count}, from cuda:0 on")
        torch.cuda.set_device(device.index or 0)  # where Triton launches
    return device
