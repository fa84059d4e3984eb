"""Fingerprint: a short name for everything but the request that can change an answer's tokens."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version

from specdec.checkpoints import resolve
from specdec.config import EngineConfig

# Drafters, budgets and control are not here: they change when tokens come, never which.
CHANGING = ("weights", "kv", "device", "backend", "verification", "deterministic")
MAX_READ = 2**20  # bytes of each small file


def fingerprint(config: EngineConfig) -> str:
    """What an answer's `system_fingerprint` says: equal for engines that write the same tokens.

    It is made of the versions of this package and of torch, of the model's folder (its small files
    by content, its weights by name and size), and of the settings that change arithmetic. The
    rules that are lossy, or not the coupled one, depend on drafters too; then so does it.

    Example: `fingerprint(EngineConfig())` is `"fp_"` and 16 hexadecimal digits.
    """
    folder = resolve(config.model)
    facts = {name: getattr(config, name) for name in CHANGING}
    facts["versions"] = [version("specdec-server"), version("torch")]
    if config.verification != "coupled":
        facts["drafting"] = [config.drafter, config.node_budget, config.control]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja") and path.is_file():
            with path.open("rb") as file:
                digest.update(path.name.encode() + b"\0" + file.read(MAX_READ))
        elif path.suffix == ".safetensors":
            digest.update(f"{path.name}\0{path.stat().st_size}".encode())
    return f"fp_{digest.hexdigest()[:16]}"
