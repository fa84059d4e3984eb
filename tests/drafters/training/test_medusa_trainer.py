"""Training of Medusa heads: which token each head learns from which state, and the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from specdec.drafters.medusa_heads import WEIGHTS_FILE, MedusaHeads
from specdec.drafters.training import medusa_trainer
from specdec.drafters.training.acceptance import KINDS
from specdec.drafters.training.medusa_trainer import HEAD_DECAY, MedusaOptions, MedusaTrainer
from specdec.drafters.training.toy_corpus import write_toy_corpus
from specdec.drafters.training.workplace import Workplace
from specdec.errors import CheckpointError

NUM_HEADS, NUM_LAYERS = 3, 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = write_toy_corpus(tmp_path_factory.mktemp("corpus"), 60)
    return Workplace.open(folder, vocabulary=36, precision="fp32", threads=1)


def trainer(place: Workplace, *, is_random: bool = True) -> MedusaTrainer:
    made = MedusaTrainer(place.target, place.projection, MedusaOptions(NUM_HEADS, NUM_LAYERS, 0.3))
    generator = torch.Generator().manual_seed(4)
    if is_random:
        with torch.no_grad():
            for parameter in made.parameters.values():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return made


@torch.no_grad()
def naive_logits(own: MedusaTrainer, head: int, hidden: Tensor, root: int, parent: int) -> Tensor:
    """One head's logits by its definition, a vector at a time, over the draft vocabulary."""
    p, embedding = own.parameters, own.target.embedding
    x = hidden.float() + p["roots"][head] @ embedding[root]
    for layer in range(NUM_LAYERS):
        x = x + F.silu(p["layers"][head, layer] @ x + p["biases"][head, layer])
    if head > 0:
        x = x + p["parents"][head - 1] @ embedding[parent]
    return own.projection.weight @ x


def test_each_head_learns_its_own_token(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medusa_trainer, "PARENT_DROPOUT", 0.0)
    own = trainer(place)
    batch = place.corpus.training[:3]
    assert place.projection.vocabulary is not None
    tokens = place.projection.vocabulary.tolist()
    total, count = 0.0, 0
    for sequence in batch:
        output = sequence.output.tolist()
        count += len(output)
        for k in range(len(output)):
            for head in range(NUM_HEADS):
                if k + 1 + head >= len(output):
                    continue
                args = (sequence.hidden[k], output[k], output[k + head])
                shares = naive_logits(own, head, *args).log_softmax(0)
                target = own.projection.weight @ sequence.hidden[k + 1 + head].float()
                loss = -0.3 * float((target.softmax(0) * shares).sum())
                label = output[k + 1 + head]
                if label in tokens:
                    loss -= 0.7 * float(shares[tokens.index(label)])
                total += HEAD_DECAY**head * loss
    weight = sum(HEAD_DECAY**head for head in range(NUM_HEADS))
    found, num_positions = own.loss(batch, seed=0)
    assert num_positions == count
    assert found.item() == pytest.approx(total / (weight * count), rel=1e-5)


def test_evaluation_ranks_the_true_token_given_the_true_parent(place: Workplace) -> None:
    own = trainer(place)
    held_out = place.corpus.held_out
    assert place.projection.vocabulary is not None
    tokens = place.projection.vocabulary.tolist()
    expected = {kind: torch.zeros(NUM_HEADS, 11) for kind in KINDS}
    chain_lengths = []
    for sequence in held_out:
        output = sequence.output.tolist()
        kind = "sampled" if sequence.temperature else "greedy"
        for k in range(len(output) - 1):
            ranks = []
            for head in range(min(NUM_HEADS, len(output) - 1 - k)):
                args = (sequence.hidden[k], output[k], output[k + head])
                best = naive_logits(own, head, *args).argsort(descending=True).tolist()
                label = output[k + 1 + head]
                rank = best.index(tokens.index(label)) if label in tokens else 10
                expected[kind][head, min(rank, 10)] += 1
                ranks.append(rank)
            if len(ranks) == NUM_HEADS:
                chain_lengths.append(next((i for i, r in enumerate(ranks) if r), NUM_HEADS))
    report = own.evaluate(held_out)
    for kind in KINDS:
        table = expected[kind] / expected[kind].sum(1, keepdim=True)
        # A share is rounded to five digits.
        torch.testing.assert_close(
            torch.tensor(report[f"ranks_{kind}"]), table[:, :10], rtol=0, atol=1e-5
        )
        tops = torch.tensor(report[kind]["top_4"])
        torch.testing.assert_close(tops, table[:, :4].sum(1), rtol=0, atol=2e-5)
    both = sum(expected.values())
    assert isinstance(both, Tensor)
    torch.testing.assert_close(
        torch.tensor(report["ranks"]),
        (both / both.sum(1, keepdim=True))[:, :10],
        rtol=0,
        atol=1e-5,
    )
    mean = sum(chain_lengths) / len(chain_lengths)
    assert report["accepted_length"] == pytest.approx(mean, abs=1e-5)


def test_parents_are_dropped_by_the_seed_alone(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, batch = trainer(place), place.corpus.training[:3]
    assert own.loss(batch, 1)[0].item() == own.loss(batch, 1)[0].item()
    assert own.loss(batch, 1)[0].item() != own.loss(batch, 2)[0].item()
    monkeypatch.setattr(medusa_trainer, "PARENT_DROPOUT", 1.1)
    without = own.loss(batch, 1)[0].item()
    with torch.no_grad():
        own.parameters["parents"].zero_()
    assert own.loss(batch, 1)[0].item() == without


def test_a_new_head_says_what_the_target_says(place: Workplace) -> None:
    own = trainer(place, is_random=False)
    hidden = place.corpus.training[0].hidden.float()
    z = own.heads.given_parent(own.heads.guesses(hidden, hidden), torch.stack([hidden] * 2))
    assert all(torch.equal(guessed, hidden) for guessed in z)


def test_files_have_the_published_names_and_come_back(place: Workplace, tmp_path: Path) -> None:
    own = trainer(place)
    own.save(tmp_path, {"ranks": [[0.5]]})
    names = set(load_file(tmp_path / WEIGHTS_FILE))
    assert {"0.0.linear.weight", "0.1.linear.bias", "2.1.linear.weight"} <= names
    assert {"0.root.weight", "1.parent.weight", "vocabulary"} <= names
    assert not {"0.parent.weight", f"0.{NUM_LAYERS}.weight"} & names
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (NUM_HEADS, NUM_LAYERS)
    assert config["base_model_name_or_path"] == place.target.name
    assert config["ranks"] == [[0.5]]
    loaded = MedusaHeads.load(tmp_path).named_tensors()
    for name, tensor in own.heads.named_tensors().items():
        assert torch.equal(loaded[name], tensor), name
    assert not list(tmp_path.glob("*.partial"))


def test_published_heads_without_grounding_are_read(tmp_path: Path) -> None:
    square = torch.eye(8)
    tensors = {
        "0.0.linear.weight": square,
        "0.0.linear.bias": torch.arange(8.0),
        "0.1.weight": torch.ones(5, 8),
    }
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    shape = {"medusa_num_heads": 1, "medusa_num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    heads = MedusaHeads.load(tmp_path)
    assert heads.roots is None
    assert heads.parents is None
    assert heads.vocabulary is None
    assert heads.projections is not None
    assert heads.projections.shape == (1, 5, 8)
    hidden = torch.arange(8.0)[None]
    expected = hidden + F.silu(hidden + torch.arange(8.0))
    assert torch.equal(heads.guesses(hidden, hidden)[0], expected)


def _drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return drop


def _put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    "damage",
    [
        _drop("1.0.linear.weight"),
        _drop("1.root.weight"),
        _put("0.0.linear.bias", torch.zeros(3)),
        _put("2.root.weight", torch.zeros(3, 3)),
        _put("vocabulary", torch.tensor([3, 2], dtype=torch.int32)),
        _put("0.2.weight", torch.zeros(4, 32)),
    ],
    ids=["no layer", "a root missing", "bias", "root", "vocabulary", "some projections"],
)
def test_heads_that_do_not_fit_are_refused(
    damage: Callable[[dict[str, Tensor]], None], place: Workplace, tmp_path: Path
) -> None:
    trainer(place).save(tmp_path, {})
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    damage(tensors)
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        MedusaHeads.load(tmp_path)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 4}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="medusa_num_layers"):
        MedusaHeads.load(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"medusa_num_heads": 4000, "medusa_num_layers": 1}', encoding="utf-8"
    )
    with pytest.raises(CheckpointError, match="4000 heads"):
        MedusaHeads.load(tmp_path)
