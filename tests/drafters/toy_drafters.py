"""Every drafter over the toy target, by the name that the command line gives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.composite import CompositeDrafter
from specdec.config import Backend, EngineConfig
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.medusa import MedusaDrafter
from specdec.drafters.medusa_heads import MedusaHeads
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.packed_heads import PackedHeads
from specdec.drafters.prediction import PredictionDrafter
from specdec.drafters.small_model import SmallModelDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.drafting import Drafter
from specdec.loading import LoadedModel, load_target
from specdec.model_config import ModelConfig
from specdec.native_model import NativeModel
from tests.toy import CONFIG, RandomTensors, toy_model

NAMES = ("ngram", "suffix", "prediction", "small-model", "medusa")
COMPOSITIONS = ("suffix,medusa", "prediction,suffix,small-model", "ngram,medusa,small-model")
EMBEDDING = "model.embed_tokens.weight"


class NearTensors:
    """The toy target's weights, a little off: a draft model that is often right."""

    def __init__(self, config: Mapping[str, Any], noise: float) -> None:
        self._target, self._other = RandomTensors(config, 0), RandomTensors(config, 1)
        self._noise = noise

    def get(self, name: str) -> Tensor:
        weight = self._target.get(name)
        return weight if "norm" in name else weight + self._noise * self._other.get(name)


def backend_of(loaded: LoadedModel) -> Backend:
    """What computes a toy target."""
    return "native" if isinstance(loaded.model, NativeModel) else "torch"


@cache
def toy_draft_model(backend: Backend, noise: float = 0.1) -> DraftModel:
    """A draft model of the toy target's shape and backend; without noise it is the target."""
    shape = ModelConfig.from_checkpoint(CONFIG)
    config = EngineConfig(backend=backend, weights="fp32", threads=1)
    model = load_target(config, shape, NearTensors(CONFIG, noise), shape.max_position)
    return DraftModel(model, torch.arange(shape.vocab_size), shape.max_position)


def toy_heads(*, num_heads: int = 3, num_layers: int = 1, has_parents: bool = True) -> MedusaHeads:
    """Heads of random tensors: right now and then, as the alphabet is small."""
    generator = torch.Generator().manual_seed(5)
    hidden = CONFIG["hidden_size"]

    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    return MedusaHeads(
        random(num_heads, num_layers, hidden, hidden),
        random(num_heads, num_layers, hidden),
        random(num_heads, hidden, hidden) if has_parents else None,
        random(num_heads - 1, hidden, hidden) if has_parents else None,
    )


def toy_drafters(names: str, loaded: LoadedModel | None = None, *, num_blocks: int = 40) -> Drafter:
    """The drafters of a comma-separated list, composed if there are several.

    num_blocks: of a small model's own KV cache, 16 tokens each.
    """
    made = [_made(name, loaded or toy_model(), num_blocks) for name in names.split(",")]
    if len(made) == 1:
        return made[0]
    return CompositeDrafter(made, vocab_size=CONFIG["vocab_size"])


def _made(name: str, loaded: LoadedModel, num_blocks: int) -> Drafter:
    if name == "small-model":
        draft = toy_draft_model(backend_of(loaded))
        return SmallModelDrafter(draft, num_blocks=num_blocks, block_size=16)
    if name == "medusa":
        embedding = RandomTensors(CONFIG, 0).get(EMBEDDING)
        return MedusaDrafter(PackedHeads(toy_heads(), loaded.model, embedding, embedding))
    simple = {"ngram": NgramDrafter, "suffix": SuffixDrafter, "prediction": PredictionDrafter}
    made: Drafter = simple[name]()
    return made


def parts(drafter: Drafter) -> Iterator[Drafter]:
    """The drafters that a drafter is composed of, itself if it is none of several."""
    if isinstance(drafter, CompositeDrafter):
        for part in drafter.drafters:
            yield from parts(part)
    else:
        yield drafter


def num_faults(drafter: Drafter) -> int:
    """How often the guards of compositions had to catch something."""
    if not isinstance(drafter, CompositeDrafter):
        return 0
    return drafter.num_faults.total() + sum(map(num_faults, drafter.drafters))


def check_drafter(drafter: Drafter) -> None:
    """What must hold after every step: no fault, and small models account for their blocks."""
    assert num_faults(drafter) == 0
    for part in parts(drafter):
        if isinstance(part, SmallModelDrafter):
            followers = part._followers.values()
            part.pool.check([follower.block_ids for follower in followers])
            for follower in followers:
                num_slots = len(follower.block_ids) * part.pool.block_size
                assert 0 <= follower.num_computed <= min(num_slots, follower.request.num_tokens)
                num_full = follower.num_computed // part.pool.block_size
                assert follower.num_published == num_full


def num_held(drafter: Drafter) -> int:
    """How much a drafter keeps of requests; nothing once they have ended."""
    if isinstance(drafter, CompositeDrafter):
        return len(drafter._active) + sum(map(num_held, drafter.drafters))
    if isinstance(drafter, SmallModelDrafter):
        return len(drafter._followers) + drafter.pool.num_blocks - drafter.pool.num_free
    per_request = ("_states", "_indexes", "_texts", "_alignments")
    return sum(len(getattr(drafter, name, ())) for name in per_request)
