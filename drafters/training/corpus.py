"""Corpus: sequences that a target generated, with the states its tokens were chosen from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec import checkpoints
from specdec.errors import CheckpointError

CONFIG_FILE = "corpus.json"
SHARDS = "shard-*.safetensors"
HELD_OUT_ONE_IN = 10
MAX_CACHED_BYTES = 1 << 32  # of derived rows kept by `RowCache`


@dataclass(frozen=True, eq=False)
class TrainingSequence:
    """One prompt and its output. Tensors are views of a mapped file: do not write to them."""

    token_ids: Tensor  # int32 [num_tokens], the prompt, then the output
    output_start: int
    hidden: Tensor  # [num_outputs, hidden]; the row from whose logits output k was chosen
    temperature: float
    task: str

    @property
    def prompt(self) -> Tensor:
        """Token ids of the prompt, int32 [output_start]."""
        return self.token_ids[: self.output_start]

    @property
    def output(self) -> Tensor:
        """Token ids of the output, int32 [num_outputs]."""
        return self.token_ids[self.output_start :]

    def digest(self) -> bytes:
        """Names the sequence: a hash of its tokens, where its output begins, and its temperature.

        Starts with the hash of the prompt alone, so that answers to one prompt sort together.
        """
        rest = f"{self.output_start} {self.temperature}".encode()
        return _hash(_bytes(self.prompt)) + _hash(_bytes(self.token_ids) + rest)

    @property
    def is_held_out(self) -> bool:
        """Whether it is kept from training: chosen by its prompt, the same in every corpus."""
        return int.from_bytes(_hash(_bytes(self.prompt)), "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Corpus:
    """The sequences of a folder, in an order that does not depend on its shards.

    Example: `Corpus.open(Path("corpus")).training[0].output`.
    """

    model: str  # as `--model` takes it
    hidden_size: int
    vocab_size: int
    training: tuple[TrainingSequence, ...]
    held_out: tuple[TrainingSequence, ...]
    fingerprint: str
    config: Mapping[str, Any] = field(repr=False)  # all of corpus.json

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Map the shards of a folder. Raises CheckpointError naming what is missing or damaged."""
        config = checkpoints.read_json(folder / CONFIG_FILE)
        try:
            model = str(config["model"])
            hidden_size, vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / CONFIG_FILE} is damaged ({error})") from None
        named = {}
        for shard in sorted(folder.glob(SHARDS)):
            for sequence in read_shard(shard, hidden_size, vocab_size):
                named[sequence.digest()] = sequence  # the same text twice teaches nothing
        digests = sorted(named)
        sequences = [named[digest] for digest in digests]
        training = tuple(s for s in sequences if not s.is_held_out)
        held_out = tuple(s for s in sequences if s.is_held_out)
        if not training or not held_out:
            raise CheckpointError(
                f"{folder} holds {len(training)} sequences to train on and {len(held_out)} to test"
                " on, which is too few: generate more"
            )
        fingerprint = hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()
        return cls(model, hidden_size, vocab_size, training, held_out, fingerprint, config)


def read_shard(file: Path, hidden_size: int, vocab_size: int) -> list[TrainingSequence]:
    """The sequences of one shard. Raises CheckpointError if it is damaged or of another target."""
    try:
        with safe_open(file, framework="pt") as shard:
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118  # safetensors' handle cannot be iterated
            tasks = json.loads((shard.metadata() or {}).get("tasks", "[]"))
        starts, output_starts = tensors["sequence_starts"], tensors["output_starts"]
        token_ids, hidden = tensors["token_ids"], tensors["hidden"]
        temperatures = tensors["temperatures"].tolist()
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); remove it and go on generating") from (
            error
        )
    counts = starts[1:] - output_starts
    if (
        hidden.shape != (int(counts.sum()), hidden_size)
        or int(counts.min()) < 1
        or not len(tasks) == len(temperatures) == len(output_starts) == len(starts) - 1
        or not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size
    ):
        raise CheckpointError(f"{file} does not fit {CONFIG_FILE}; is it of another target?")
    rows = [0, *counts.cumsum(0).tolist()]
    spans = zip(starts.tolist(), starts[1:].tolist(), output_starts.tolist(), strict=False)
    return [
        TrainingSequence(
            token_ids[begin:end],
            output_start - begin,
            hidden[rows[index] : rows[index + 1]],
            temperatures[index],
            str(tasks[index]),
        )
        for index, (begin, end, output_start) in enumerate(spans)
    ]


def write_shard(file: Path, sequences: Sequence[TrainingSequence]) -> None:
    """Write sequences in whole or not at all, as `read_shard` reads them."""
    lengths = torch.tensor([0, *(len(s.token_ids) for s in sequences)])
    starts = lengths.cumsum(0)
    prompts = torch.tensor([s.output_start for s in sequences])
    tensors = {
        "token_ids": torch.cat([s.token_ids for s in sequences]).int(),
        "sequence_starts": starts.int(),
        "output_starts": (starts[:-1] + prompts).int(),
        "hidden": torch.cat([s.hidden for s in sequences]).bfloat16(),
        "temperatures": torch.tensor([s.temperature for s in sequences], dtype=torch.float32),
    }
    partial = file.with_suffix(".partial")
    save_file(tensors, partial, {"tasks": json.dumps([s.task for s in sequences])})
    partial.replace(file)


def order(
    sequences: Sequence[TrainingSequence],
    *,
    seed: int,
    epoch: int,
    batch_tokens: int,
    unit: Literal["outputs", "tokens"],
) -> list[list[int]]:
    """Batches of an epoch as indices of sequences: shuffled by seed and epoch alone.

    A batch is closed by the sequence that brings its outputs (or all its tokens) to `batch_tokens`.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    batches: list[list[int]] = []
    room = 0
    for index in torch.randperm(len(sequences), generator=generator).tolist():
        if room <= 0:
            batches.append([])
            room = batch_tokens
        batches[-1].append(index)
        sequence = sequences[index]
        room -= len(sequence.hidden if unit == "outputs" else sequence.token_ids)
    return batches


class RowCache:
    """Rows derived from a sequence's hidden states, kept for the next epoch while there is room.

    Derived sequence by sequence, so that they do not depend on the batch it is in.
    """

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._rows: dict[int, Tensor] = {}
        self._room = max_bytes

    def get(self, sequence: TrainingSequence) -> Tensor | None:
        """What was put for this sequence."""
        return self._rows.get(id(sequence))

    def put(self, sequence: TrainingSequence, rows: Tensor) -> None:
        """Keep rows if there is room. The sequence must outlive the cache."""
        self._room -= rows.nbytes
        if self._room >= 0:
            self._rows[id(sequence)] = rows


def _bytes(token_ids: Tensor) -> bytes:
    return token_ids.int().numpy().tobytes()


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
