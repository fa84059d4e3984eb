"""Training of a small model: its arithmetic is a Llama's, its files are what one can load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec import checkpoints
from specdec.drafters.training.draft_layers import DraftLayers, copied_layers
from specdec.drafters.training.small_model_trainer import (
    CHAIN,
    WEIGHTS_FILE,
    SmallModelOptions,
    SmallModelTrainer,
)
from specdec.drafters.training.toy_corpus import CONFIG, write_toy_corpus, write_toy_target
from specdec.drafters.training.workplace import Workplace
from specdec.errors import UnsupportedModel, UsageError
from specdec.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
# fp32 sums of some tens of terms of about 1, in another order: each rounds by 6e-8 of its size.
ATOL = 2e-5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = write_toy_corpus(tmp_path_factory.mktemp("corpus"), 60)
    return Workplace.open(folder, vocabulary=36, precision="fp32", threads=1)


def trainer(place: Workplace, *layers: int, inner: int | None = None) -> SmallModelTrainer:
    options = SmallModelOptions(layers or (-1,), inner, 0.3)
    return SmallModelTrainer(place.target, place.projection, options, seed=0)


def transformers_model(config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """The same weights in transformers; an embedding is in `tensors`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("cpu"):
        model = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    return model


def test_states_give_the_logits_of_transformers(tmp_path: Path) -> None:
    tensors = write_toy_target(tmp_path)
    config = ModelConfig.from_checkpoint(CONFIG)
    ours = copied_layers(
        checkpoints.open_weights(tmp_path),
        range(config.num_layers),
        inner=config.intermediate_size,
        hidden=config.hidden_size,
        seed=0,
    )
    layers = DraftLayers(config, ours, torch.float32)
    ids = torch.randint(config.vocab_size, (90,), generator=torch.Generator().manual_seed(2))
    lengths = [60, 1, 29]
    states = layers.states(tensors[EMBEDDING][ids], lengths, [0, 0, 0])
    logits = states @ tensors[EMBEDDING].t()
    model = transformers_model(dict(CONFIG), tensors)
    with torch.no_grad():
        expected = torch.cat([model(part[None]).logits[0] for part in ids.split(lengths)])
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=ATOL)
    # Only what comes after the prompts: the same rows.
    starts = [40, 0, 28]
    some = layers.states(tensors[EMBEDDING][ids], lengths, starts)
    kept = [*range(40, 60), 60, 89]
    torch.testing.assert_close(some, states[kept], rtol=0, atol=ATOL)


def test_what_is_saved_is_a_llama_that_guesses_the_same(place: Workplace, tmp_path: Path) -> None:
    own = trainer(place, 0, -1, inner=20)
    with torch.no_grad():
        for parameter in own.parameters.values():
            parameter += 0.05 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(len(parameter))
            )
    own.save(tmp_path, {"ranks": [[0.5]]})
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["shares_embeddings_with"] == place.target.name
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (2, 20)
    assert config["ranks"] == [[0.5]]
    assert ModelConfig.from_checkpoint(config) == own.config
    saved = load_file(tmp_path / WEIGHTS_FILE)
    assert torch.equal(saved.pop("vocabulary"), place.projection.vocabulary.int())  # type: ignore[union-attr]  # this one has a projection
    fields = {name: config[name] for name in CONFIG if name != "architectures"}
    model = transformers_model(fields, {**saved, EMBEDDING: place.target.embedding})
    batch = place.corpus.training[:3]
    with torch.no_grad():
        states = own._states(batch)
        expected = [
            model.model(s.token_ids[None, :-1].long()).last_hidden_state[0, s.output_start - 1 :]
            for s in batch
        ]
    torch.testing.assert_close(states, torch.cat(expected), rtol=0, atol=ATOL)


def test_the_loss_is_that_of_the_outputs(place: Workplace) -> None:
    own = trainer(place)
    batch = place.corpus.training[:4]
    vocabulary = place.projection.vocabulary
    assert vocabulary is not None
    tokens = vocabulary.tolist()
    losses = []
    for sequence in batch:
        with torch.no_grad():
            shares = (own._states([sequence]) @ place.projection.weight.t()).log_softmax(-1)
        assert len(shares) == len(sequence.output)
        target = (sequence.hidden.float() @ place.projection.weight.t()).softmax(-1)
        for row, token in enumerate(sequence.output.tolist()):
            loss = -0.3 * float((target[row] * shares[row]).sum())
            if token in tokens:
                loss -= 0.7 * float(shares[row, tokens.index(token)])
            losses.append(loss)
    found, num_positions = own.loss(batch, seed=0)
    assert num_positions == len(losses)
    assert found.item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_it_begins_as_the_layers_it_was_told_of(place: Workplace) -> None:
    theirs, own = place.target.weights, trainer(place, 1, -1)
    for layer, other in ((0, 1), (1, 2)):
        for part in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm"):
            copied = own.parameters[f"model.layers.{layer}.{part}.weight"]
            assert torch.equal(copied, theirs.get(f"model.layers.{other}.{part}.weight"))
    assert torch.equal(own.parameters["model.norm.weight"], theirs.get("model.norm.weight"))


def test_chains_are_runs_of_right_guesses(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ranks(states: Tensor, label: Tensor) -> Tensor:
        assert len(states) == len(label)
        return (label % 4 == 1).long()  # wrong at every fourth token

    monkeypatch.setattr(place.projection, "ranks", ranks)
    report = trainer(place).evaluate(place.corpus.held_out)
    lengths, rights = [], []
    for sequence in place.corpus.held_out:
        right = (place.projection.index(sequence.output) % 4 != 1).tolist()
        rights += right
        for k in range(len(right) - CHAIN + 1):
            run = right[k : k + CHAIN]
            lengths.append(run.index(False) if False in run else CHAIN)
    assert 0 < sum(lengths) < CHAIN * len(lengths)
    assert report["accepted_length"] == pytest.approx(sum(lengths) / len(lengths), abs=1e-5)
    share = sum(rights) / len(rights)
    assert report["ranks"] == [
        [pytest.approx(share, abs=1e-5), pytest.approx(1 - share, abs=1e-5)] + [0.0] * 8
    ]


def test_what_cannot_be_trained_is_refused(place: Workplace) -> None:
    with pytest.raises(UsageError, match="no layer 3"):
        trainer(place, 3)
    with pytest.raises(UsageError, match="no layer -4"):
        trainer(place, -4)
    with pytest.raises(UsageError, match="at least one"):
        SmallModelTrainer(place.target, place.projection, SmallModelOptions(()), seed=0)
    biased = replace(place.target, config=replace(place.target.config, has_qkv_bias=True))
    with pytest.raises(UnsupportedModel, match="Medusa"):
        SmallModelTrainer(biased, place.projection, SmallModelOptions(), seed=0)
