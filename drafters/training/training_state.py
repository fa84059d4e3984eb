"""Training state: weights and optimiser moments of a training, to go on from bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.errors import CheckpointError, UsageError

FILE = "training_state.safetensors"


def save(
    out: Path,
    parameters: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    identity: Mapping[str, Any],
    position: Mapping[str, Any],
) -> None:
    """Write one file in whole or not at all: tensors, and JSON in its metadata."""
    tensors = {}
    for name, parameter in parameters.items():
        tensors[f"parameter/{name}"] = parameter.detach()
        for key, value in optimiser.state[parameter].items():
            tensors[f"{key}/{name}"] = value
    metadata = {"identity": json.dumps(identity), "position": json.dumps(position)}
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, partial := out / f"{FILE}.partial", metadata)
    partial.replace(out / FILE)


def load(
    out: Path,
    parameters: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    identity: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Restore in place and return the position, or None if nothing was saved.

    Raises UsageError if the state is of a training with another identity, CheckpointError if it is
    damaged.
    """
    file = out / FILE
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as saved:
            metadata = saved.metadata() or {}
            _check(out, json.loads(metadata["identity"]), json.loads(json.dumps(identity)))
            position: dict[str, Any] = json.loads(metadata["position"])
            by_parameter: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
            for key in saved.keys():  # noqa: SIM118  # safetensors' handle cannot be iterated
                kind, _, name = key.partition("/")
                by_parameter[name][kind] = saved.get_tensor(key).clone()
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{file} is damaged ({error}); remove {out} to train from the beginning"
        ) from error
    with torch.no_grad():
        for name, parameter in parameters.items():
            moments = by_parameter[name]
            parameter.copy_(moments.pop("parameter"))
            # AdamW counts its steps on the CPU; the rest lies beside the parameter.
            if moments:
                optimiser.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device)
                    for key, value in moments.items()
                }
    return position


def _check(out: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    names = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    if names:
        changes = ", ".join(f"{n} {saved.get(n)!r} -> {wanted.get(n)!r}" for n in names)
        raise UsageError(
            f"{out} holds a training with other settings ({changes}); give those again to go on"
            " with it, or another --out"
        )
