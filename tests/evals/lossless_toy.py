"""Toys of losslessness: samples and settings over the toy folder, and models with twin tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from specdec.config import EngineConfig
from specdec.evals.data.sample import Sample
from specdec.evals.lossless.bench import LosslessSettings, compare_all
from specdec.evals.lossless.comparison import Comparison
from specdec.evals.lossless.in_process import InProcess
from specdec.evals.lossless.margin import default_tie_margin
from specdec.evals.report.journal import Journal
from tests.evals.toy_folder import toy_config, write_toy

DRAFTER = "prediction,suffix"
TIE_MARGIN = default_tie_margin("fp32", "auto")


def config_for(folder: Path, **changes: Any) -> EngineConfig:
    """PyTorch's forward over the toy folder, a fixed node budget."""
    return replace(toy_config(folder, "torch"), control="fixed", node_budget=6, **changes)


def samples(*later: str) -> list[Sample]:
    """Three prompts of two tasks; all with the same later turns."""
    asked = (("chat", "the cat"), ("qa", "who"), ("chat", "aaaa"))
    return [
        Sample(f"s{number}", task, ({"role": "user", "content": text},), later)
        for number, (task, text) in enumerate(asked)
    ]


def settings_for(**changes: Any) -> LosslessSettings:
    """Short answers of all three samples, at temperatures 0 and 1."""
    own = LosslessSettings(
        samples(), (DRAFTER,), (0.0, 1.0), TIE_MARGIN, seeds=1, max_tokens=20, concurrency=3
    )
    return replace(own, **changes)


def compared(folder: Path, **changes: Any) -> list[Comparison]:
    """All comparisons of a run over a folder."""
    respondent = InProcess(config_for(folder))
    return compare_all(settings_for(**changes), respondent, Journal(None, {}))


def write_twins(folder: Path, token: int, twin: int) -> Path:
    """The toy folder, but that `twin` has the embedding of `token` less a millionth.

    Where `token` is the likeliest, `twin` is next, within what rounding can do.
    """
    write_toy(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    rows = tensors["model.embed_tokens.weight"]
    rows[twin] = rows[token] * (1 - 2.0**-20)
    save_file(tensors, file)
    return folder
