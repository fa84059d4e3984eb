"""LoadedModel: from a model's name to weights, tokenizer and limits in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from specdec import checkpoints
from specdec.config import DType, EngineConfig
from specdec.errors import UsageError
from specdec.kernels import dispatch
from specdec.kernels.attention_group import ROW_TILE
from specdec.kv_cache import KVCache
from specdec.model import TargetModel
from specdec.model_config import ModelConfig
from specdec.row_invariance import PINNED_ROWS
from specdec.tokenizer import Tokenizer
from specdec.weights import ModelWeights

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class LoadedModel:
    """What an engine needs of a model; `tokenizer` is None for models without text."""

    model: TargetModel
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    name: str
    max_model_len: int


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
            weights = ModelWeights.load(
                model_config,
                checkpoints.open_weights(folder),
                resolve_dtype(config.dtype, device),
                device,
                _row_tile(config, device),
            )
        except torch.OutOfMemoryError:
            raise UsageError(f"the weights of {config.model} do not fit on {device}") from None
        tokenizer = loading.result()
    return LoadedModel(
        model=TargetModel(model_config, weights, max_model_len),
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids,
        name=config.model,
        max_model_len=max_model_len,
    )


def resolve_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """The weights' dtype; `auto` is bf16 where the processor multiplies bf16 natively."""
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        return torch.float32
    return torch.bfloat16


def make_kv_cache(config: EngineConfig, model: TargetModel, max_model_len: int) -> KVCache:
    """A KV cache of the configured size.

    Raises UsageError when it cannot hold one request of the longest context.
    """
    shape = model.config
    device = model.weights.embedding.device
    dtype = torch.float32 if device.type == "cpu" else model.weights.dtype
    if config.kv_dtype == "fp8":
        dtype = torch.float8_e4m3fn
    per_block = KVCache.bytes_per_block(
        shape.num_layers, shape.num_kv_heads, config.block_size, shape.head_dim, dtype
    )
    num_blocks = config.kv_memory_mib * 2**20 // per_block
    num_needed = -(-max_model_len // config.block_size)
    if num_blocks < num_needed:
        needed_mib = -(-num_needed * per_block // 2**20)
        raise UsageError(
            f"{config.kv_memory_mib} MiB of KV cache cannot hold one context of {max_model_len} "
            f"tokens; give at least {needed_mib} MiB or a smaller max model len"
        )
    try:
        return KVCache(
            num_layers=shape.num_layers,
            num_blocks=num_blocks,
            num_kv_heads=shape.num_kv_heads,
            block_size=config.block_size,
            head_dim=shape.head_dim,
            dtype=dtype,
            device=device,
        )
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
