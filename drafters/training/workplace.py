"""Workplace: what every training needs: corpus, target, draft vocabulary, device and threads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.cores import usable_cores
from specdec.drafters.training.corpus import Corpus
from specdec.drafters.training.loop import LoopSettings, Trainer, TrainingLoop
from specdec.drafters.training.projection import DraftProjection, coverage, draft_vocabulary
from specdec.drafters.training.target_tensors import TargetTensors, training_dtype
from specdec.errors import UsageError


@dataclass(frozen=True)
class Workplace:
    """Opened once per training."""

    corpus: Corpus
    target: TargetTensors
    projection: DraftProjection
    coverage: float  # share of the held-out output tokens that can be drafted

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        model: str | None = None,
        vocabulary: int = 8192,
        precision: str = "auto",
        device: str = "cpu",
        threads: int | None = None,
    ) -> Workplace:
        """Read a corpus and its target. Raises UsageError or CheckpointError with what to do."""
        if device not in ("cpu", "cuda"):
            raise UsageError(f"unknown device {device!r}; choose cpu or cuda")
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("no CUDA device here; leave out --device to train on the CPU")
        torch.set_num_threads(threads or usable_cores())
        corpus = Corpus.open(folder)
        place = torch.device(device)
        dtype = training_dtype(precision, place)
        target = TargetTensors.load(corpus, dtype=dtype, device=place, model=model)
        tokens = draft_vocabulary(corpus.training, vocabulary, corpus.vocab_size)
        projection = DraftProjection(target.output_projection, tokens)
        return cls(corpus, target, projection, coverage(corpus.held_out, tokens))

    def loop(
        self,
        trainer: Trainer,
        kind: str,
        options: Any,
        settings: LoopSettings,
        out: Path,
        save_minutes: float,
    ) -> TrainingLoop:
        """The training of `trainer`, at its beginning or where it was stopped."""
        vocabulary = self.projection.vocabulary
        identity = {
            "kind": kind,
            **asdict(options),
            "vocabulary": None if vocabulary is None else len(vocabulary),
            "precision": str(self.target.embedding.dtype),
        }
        export = {"draft_vocabulary_coverage": round(self.coverage, 5)}
        return TrainingLoop(
            trainer,
            self.corpus,
            settings,
            out,
            identity=identity,
            export=export,
            save_minutes=save_minutes,
        )

    def describe(self) -> dict[str, Any]:
        """What is trained on, in a few numbers."""
        return {
            "sequences": len(self.corpus.training),
            "held_out": len(self.corpus.held_out),
            "output_tokens": sum(len(s.hidden) for s in self.corpus.training),
            "draft_vocabulary": len(self.projection.weight),
            "coverage": round(self.coverage, 4),
        }
