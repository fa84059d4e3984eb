"""The corpus on disk: what is read back, what is kept from training, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.drafters.training.corpus import (
    HELD_OUT_ONE_IN,
    Corpus,
    RowCache,
    TrainingSequence,
    order,
    read_shard,
    write_shard,
)
from specdec.drafters.training.toy_corpus import CONFIG, toy_sequences, write_toy_corpus
from specdec.errors import CheckpointError

HIDDEN, VOCAB = CONFIG["hidden_size"], CONFIG["vocab_size"]


def sequences(count: int) -> list[TrainingSequence]:
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    return toy_sequences(embedding, count)


def test_a_shard_gives_back_its_sequences(tmp_path: Path) -> None:
    written = sequences(9)
    write_shard(tmp_path / "shard-00000.safetensors", written)
    read = read_shard(tmp_path / "shard-00000.safetensors", HIDDEN, VOCAB)
    assert len(read) == len(written)
    for ours, theirs in zip(read, written, strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.hidden, theirs.hidden)
        assert len(ours.output) == len(ours.hidden)
        assert torch.equal(torch.cat((ours.prompt, ours.output)), ours.token_ids)
        facts = (ours.output_start, ours.temperature, ours.task)
        assert facts == (theirs.output_start, theirs.temperature, theirs.task)


def test_shards_do_not_matter(tmp_path: Path) -> None:
    write_toy_corpus(tmp_path / "a", 60)
    write_toy_corpus(tmp_path / "b", 60)
    shards = sorted((tmp_path / "b").glob("shard-*"))
    mixed = [s for shard in shards for s in read_shard(shard, HIDDEN, VOCAB)][::-1]
    mixed = [replace(s, token_ids=s.token_ids.clone(), hidden=s.hidden.clone()) for s in mixed]
    for shard in shards:
        shard.unlink()
    for number in range(3):
        write_shard(tmp_path / "b" / f"shard-{number:05}.safetensors", mixed[number::3])
    a, b = Corpus.open(tmp_path / "a"), Corpus.open(tmp_path / "b")
    assert a.fingerprint == b.fingerprint
    for ours, theirs in ((a.training, b.training), (a.held_out, b.held_out)):
        assert [s.digest() for s in ours] == [s.digest() for s in theirs]
    write_shard(tmp_path / "b" / "shard-00009.safetensors", mixed[:1])
    assert Corpus.open(tmp_path / "b").fingerprint == a.fingerprint  # the same text once more


def test_answers_to_one_prompt_stay_together_and_a_tenth_is_held_out() -> None:
    num_held_out = 0
    for number in range(2000):
        ids = torch.tensor([number % 50, number // 50, 3, 4, 5], dtype=torch.int32)
        cold = TrainingSequence(ids, 2, torch.zeros(3, 4), 0.0, "qa")
        other = torch.tensor([*ids[:2], 9, 9], dtype=torch.int32)
        warm = TrainingSequence(other, 2, torch.zeros(2, 4), 1.0, "chat")
        assert cold.is_held_out == warm.is_held_out
        assert cold.digest() != warm.digest()
        num_held_out += cold.is_held_out
    expected = 2000 / HELD_OUT_ONE_IN
    assert abs(num_held_out - expected) < 5 * expected**0.5  # five standard deviations


def test_the_split_is_the_same_next_year() -> None:
    ids = torch.arange(12, dtype=torch.int32)
    chosen = [
        start
        for start in range(1, 12)
        if TrainingSequence(ids, start, torch.zeros(12 - start, 4), 0.0, "qa").is_held_out
    ]
    assert chosen == [7, 9]


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _overwrite(file: Path) -> None:
    file.write_text("hello", encoding="utf-8")


def _change(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        tensors = load_file(file)
        tensors[name] = change(tensors[name])
        save_file(tensors, file, {"tasks": json.dumps(["qa"] * 30)})

    return apply


def _forget_hidden(file: Path) -> None:
    tensors = load_file(file)
    del tensors["hidden"]
    save_file(tensors, file, {"tasks": json.dumps(["qa"] * 30)})


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": _truncate,
    "not safetensors": _overwrite,
    "no hidden": _forget_hidden,
    "token beyond the vocabulary": _change("token_ids", lambda t: t + VOCAB),
    "hidden of another size": _change("hidden", lambda t: t[:, 1:].contiguous()),
    "rows missing": _change("hidden", lambda t: t[1:].contiguous()),
    "a sequence missing": _change("temperatures", lambda t: t[1:].contiguous()),
    "an output that is empty": _change("output_starts", lambda t: t + 40),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_shards_are_refused_by_name(damage: Callable[[Path], None], tmp_path: Path) -> None:
    write_toy_corpus(tmp_path, 60)
    damage(tmp_path / "shard-00001.safetensors")
    with pytest.raises(CheckpointError, match="shard-00001"):
        Corpus.open(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"corpus\.json"):
        Corpus.open(tmp_path)
    write_toy_corpus(tmp_path, 60)
    for shard in tmp_path.glob("shard-*"):
        shard.unlink()
    with pytest.raises(CheckpointError, match="too few"):
        Corpus.open(tmp_path)
    (tmp_path / "corpus.json").write_text('{"model": "x"}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="hidden_size"):
        Corpus.open(tmp_path)


@pytest.mark.parametrize("unit", ["outputs", "tokens"])
def test_an_epoch_has_every_sequence_once(unit: str) -> None:
    own = sequences(50)

    def batches(seed: int, epoch: int) -> list[list[int]]:
        return order(own, seed=seed, epoch=epoch, batch_tokens=70, unit=unit)  # type: ignore[arg-type]  # the parameters are of its words

    first = batches(3, 0)
    assert sorted(index for batch in first for index in batch) == list(range(50))
    assert first == batches(3, 0)
    assert first != batches(3, 1)
    assert first != batches(4, 0)
    sizes = [len(s.hidden if unit == "outputs" else s.token_ids) for s in own]
    for batch in first[:-1]:
        assert sum(sizes[i] for i in batch) >= 70 > sum(sizes[i] for i in batch[:-1])


def test_a_row_cache_is_bounded() -> None:
    own = sequences(3)
    cache = RowCache(max_bytes=100)
    for sequence in own:
        cache.put(sequence, torch.zeros(12))  # 48 bytes
    assert [cache.get(s) is not None for s in own] == [True, True, False]
