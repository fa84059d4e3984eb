"""Every drafter over the toy target, by the name that the command line gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.composite import CompositeDrafter
from specdec.config import EngineConfig
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
from tests.toy import CONFIG, Form, RandomTensors

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


def toy_draft_model(form: Form, noise: float = 0.1) -> DraftModel:
    """A draft model of the toy target's shape and backend."""
    shape = ModelConfig.from_checkpoint(CONFIG)
    config = EngineConfig(backend=form.backend, weights="fp32", threads=1)
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


def toy_drafters(names: str, loaded: LoadedModel, form: Form, *, num_blocks: int = 40) -> Drafter:
    """The drafters of a comma-separated list, composed if there are several."""
    made = [_made(name, loaded, form, num_blocks) for name in names.split(",")]
    if len(made) == 1:
        return made[0]
    return CompositeDrafter(made, vocab_size=loaded.model.config.vocab_size)


def _made(name: str, loaded: LoadedModel, form: Form, num_blocks: int) -> Drafter:
    if name == "small-model":
        return SmallModelDrafter(toy_draft_model(form), num_blocks=num_blocks, block_size=16)
    if name == "medusa":
        embedding = RandomTensors(CONFIG, 0).get(EMBEDDING)
        return MedusaDrafter(PackedHeads(toy_heads(), loaded.model, embedding, embedding))
    simple = {"ngram": NgramDrafter, "suffix": SuffixDrafter, "prediction": PredictionDrafter}
    made: Drafter = simple[name]()
    return made
