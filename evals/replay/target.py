"""RecordedTarget: stands where the target stood when answers were recorded; it has only tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import torch
from torch import Tensor

from specdec import checkpoints, native_choice
from specdec.builtin_model import cache_folder
from specdec.composite import CompositeDrafter
from specdec.config import EngineConfig, WeightPrecision
from specdec.drafting import DraftContext, Drafter, parse_drafters
from specdec.errors import UsageError
from specdec.kernels import native_library
from specdec.kernels.batch import Batch
from specdec.loading import LoadedModel
from specdec.model_config import ModelConfig
from specdec.model_runner import ModelRunner
from specdec.plan import StepPlan
from specdec.target import Linear, PagedCache, Target, TargetOutput
from specdec.tokenizer import Tokenizer
from specdec.tree import DraftTree

CACHE_TOKENS = 2**20  # of which prefix hits are found; they hold no keys and values


@dataclass
class RecordedTarget:
    """A `Target` of a shape without weights: what it would answer is recorded."""

    config: ModelConfig
    max_model_len: int

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def logits_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def precision(self) -> WeightPrecision:
        return "fp32"

    @property
    def weight_bytes(self) -> int:
        return 0

    def make_linear(self, weight: Tensor) -> Linear:
        """Nothing is computed: UsageError."""
        raise UsageError("a replay computes nothing")

    def kv_bytes_per_block(self, kv: str, block_size: int) -> int:
        """As good as nothing, so that any context fits."""
        return 1

    def make_kv_cache(self, kv: str, *, num_blocks: int, block_size: int) -> PagedCache:
        """Blocks for the longest context, and for those of earlier requests to be found again."""
        num_tokens = max(CACHE_TOKENS, self.max_model_len)
        return RecordedCache(min(num_blocks, -(-num_tokens // block_size)), block_size)


@dataclass
class RecordedCache:
    """A `PagedCache` of slots in which nothing lies."""

    num_blocks: int
    block_size: int

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Nothing lies there."""

    def scrub(self, block_ids: Sequence[int]) -> None:
        """Nothing lies there."""


class RecordedRunner(ModelRunner):
    """Runs no forward; what comes of it is nothing but the number of nodes."""

    def __init__(self, target: RecordedTarget, kv_cache: PagedCache) -> None:
        super().__init__(target, kv_cache)
        self._output = TargetOutput(torch.empty(0, 0), torch.empty(0, 0))

    def pack(self, plan: StepPlan, trees: Sequence[DraftTree]) -> Batch:
        """Which logits would be whose; no rows."""
        first_logit = [0]
        for tree in trees:
            first_logit.append(first_logit[-1] + tree.num_nodes)
        return Batch((), (), (), (), (), tuple(first_logit))

    def forward(self, batch: Batch) -> TargetOutput:
        """No logits."""
        return self._output


def read_model(config: EngineConfig) -> LoadedModel:
    """The model's shape and tokenizer, without its weights.

    Raises CheckpointError, UnsupportedModel or UsageError with what to do.
    """
    folder = checkpoints.resolve(config.model)
    shape = ModelConfig.from_checkpoint(checkpoints.load_config(folder))
    max_model_len = config.max_model_len or shape.max_position
    if max_model_len > shape.max_position:
        raise UsageError(f"max model len {max_model_len} exceeds the model's {shape.max_position}")
    tokenizer = Tokenizer.load(folder)
    # Nodes are chosen as when the answers were recorded; numpy gives the same at a tenth of the
    # speed.
    native_choice.use_native(native_library.compiled(cache_folder() / "native"))
    target = RecordedTarget(shape, max_model_len)
    return LoadedModel(target, tokenizer, tokenizer.eos_token_ids, config.model, max_model_len)


def load_drafter(loaded: LoadedModel, config: EngineConfig) -> CompositeDrafter:
    """The drafters that `config.drafter` names; UsageError if one needs more than tokens.

    Example: `load_drafter(read_model(config), config)`.
    """
    shape_only = LoadedModel(
        cast(Target, _ShapeOnly(loaded.model.config)),
        loaded.tokenizer,
        loaded.eos_token_ids,
        loaded.name,
        loaded.max_model_len,
    )
    drafters: list[Drafter] = []
    for drafter, checkpoint in parse_drafters(config.drafter):
        if drafter.needs_hidden:
            _refuse(drafter, "the target's hidden states")
        try:
            made = drafter.load(DraftContext(shape_only, config, checkpoint))
        except _NotRecorded as missing:
            _refuse(drafter, f"the target itself (its {missing})")
        if made.needs_hidden:
            _refuse(drafter, "the target's hidden states")
        drafters.append(made)
    return CompositeDrafter(drafters, vocab_size=loaded.model.config.vocab_size)


class _NotRecorded(Exception):
    """A part of the target that recorded tokens do not have."""


class _ShapeOnly:
    """What drafters that need only tokens may ask of a target."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __getattr__(self, name: str) -> NoReturn:
        raise _NotRecorded(name)


def _refuse(drafter: type[Drafter], need: str) -> NoReturn:
    raise UsageError(
        f"the drafter {drafter.name} needs {need}, and a replay has only tokens: measure it with"
        " `specdec eval acceptance`"
    )
