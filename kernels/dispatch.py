"""Dispatch: the one place that chooses Triton or the reference, and says what cannot run."""

from __future__ import annotations

from importlib.util import find_spec

import torch

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)  # what the attention kernels are compiled for
MIN_CAPABILITY = (8, 0)  # bf16 products and asynchronous copies


def uses_triton(device: torch.device) -> bool:
    """Whether a device's steps run as Triton kernels; on the CPU triton is never imported."""
    return device.type == "cuda"


def objection(device: torch.device, head_dim: int, block_size: int) -> str | None:
    """Why the kernels cannot serve a model on this device, or None.

    Example: `objection(torch.device("cuda"), 72, 16)` names the supported head sizes.
    """
    if not uses_triton(device):
        return None
    if find_spec("triton") is None:
        return "the GPU path needs triton, which is not installed; use --device cpu"
    if head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        return f"the GPU kernels take heads of {sizes}, not {head_dim}; use --device cpu"
    if block_size % 16:
        return f"the GPU kernels take block sizes that are multiples of 16, not {block_size}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        have, need = (
            ".".join(map(str, version))
            for version in (torch.cuda.get_device_capability(device), MIN_CAPABILITY)
        )
        return f"{name} has compute capability {have}, the kernels need {need}; use --device cpu"
    return None
