"""TrainingLoop: epochs over a corpus that can be stopped anywhere and lose nothing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from specdec.drafters.training import training_state
from specdec.drafters.training.corpus import Corpus, TrainingSequence, order
from specdec.errors import UsageError

METRICS_FILE = "metrics.jsonl"
LOG_EVERY = 10  # steps between two lines of metrics
MAX_GRAD_NORM = 1.0
MIN_RATE = 0.05  # of the learning rate, at the end of the cosine


class Trainer(Protocol):
    """A draft model in training."""

    parameters: dict[str, Tensor]  # fp32 leaves
    unit: Literal["outputs", "tokens"]  # what a batch's size counts

    def loss(self, sequences: Sequence[TrainingSequence], seed: int) -> tuple[Tensor, int]:
        """Mean loss of a batch and its number of positions; random only by `seed`."""

    def evaluate(self, sequences: Sequence[TrainingSequence]) -> dict[str, Any]:
        """Held-out acceptance; has `accepted_length`."""

    def save(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Write what the drafter loads."""


@dataclass(frozen=True)
class LoopSettings:
    """What the course of a training depends on, besides corpus and model."""

    epochs: int = 3
    learning_rate: float = 1e-3
    warm_up: float = 0.03  # share of all steps
    weight_decay: float = 0.01
    batch_tokens: int = 2048
    seed: int = 0


@dataclass
class Position:
    """How far a training is; saved with the weights."""

    epoch: int = 0
    batch: int = 0  # within the epoch
    step: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0  # since the last line of metrics
    loss_steps: int = 0
    best: float = -1.0  # highest held-out accepted length so far


class Interrupted(Exception):
    """The training was told to stop; all of it is saved."""


class Report(Protocol):
    """Told how a training goes."""

    def step(self, done: int, total: int, loss: float, rate: float) -> None:
        """After each step: steps of how many, mean loss of late, positions per second."""

    def epoch(self, number: int, metrics: Mapping[str, Any]) -> None:
        """After each epoch, counted from 1."""


class TrainingLoop:
    """AdamW with a cosine schedule over a corpus, in an order of the seed alone.

    `out` receives the best epoch, `epoch-N/` each one, metrics.jsonl, and the state to go on from.
    `identity` tells this training from others: a saved state is continued only if it is equal.
    """

    def __init__(
        self,
        trainer: Trainer,
        corpus: Corpus,
        settings: LoopSettings,
        out: Path,
        *,
        identity: Mapping[str, Any],
        export: Mapping[str, Any] | None = None,
        save_minutes: float = 5.0,
    ) -> None:
        self.trainer, self.corpus, self.settings, self.out = trainer, corpus, settings, out
        self.identity = {**identity, **asdict(settings), "corpus": corpus.fingerprint}
        self.export = dict(export or {})
        self.save_seconds = 60 * save_minutes
        self.position = Position()
        self.is_resumed = False
        self._orders = [
            order(
                corpus.training,
                seed=settings.seed,
                epoch=epoch,
                batch_tokens=settings.batch_tokens,
                unit=trainer.unit,
            )
            for epoch in range(settings.epochs)
        ]
        self.num_steps = sum(map(len, self._orders))
        self._optimiser = torch.optim.AdamW(
            trainer.parameters.values(),
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
        )
        self._resume()

    def run(
        self, report: Report, *, is_stopped: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Train to the end and return the last epoch's metrics.

        Raises Interrupted, with everything saved, once `is_stopped` says so.
        """
        metrics: dict[str, Any] = {}
        self._clock = time.monotonic()
        saved = self._clock
        while self.position.epoch < self.settings.epochs:
            batches = self._orders[self.position.epoch]
            while self.position.batch < len(batches):
                loss, rate = self._step(batches[self.position.batch])
                report.step(self.position.step, self.num_steps, loss, rate)
                if is_stopped():
                    self.save()
                    raise Interrupted
                if time.monotonic() - saved >= self.save_seconds:
                    self.save()
                    saved = time.monotonic()
            self.save()
            metrics = self._finish_epoch()
            report.epoch(self.position.epoch, metrics)
        return metrics or last_epoch(self.out)

    def save(self) -> None:
        """Write the state to go on from, in whole or not at all."""
        now = time.monotonic()
        self.position.seconds += now - self._clock
        self._clock = now
        training_state.save(
            self.out, self.trainer.parameters, self._optimiser, self.identity, asdict(self.position)
        )

    def _step(self, batch: Sequence[int]) -> tuple[float, float]:
        began = time.monotonic()
        position, settings = self.position, self.settings
        rate = self._learning_rate(position.step)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        sequences = [self.corpus.training[index] for index in batch]
        loss, num_positions = self.trainer.loss(
            sequences, settings.seed * 1_000_003 + position.step
        )
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trainer.parameters.values(), MAX_GRAD_NORM)
        self._optimiser.step()
        position.loss_sum += loss.item()
        position.loss_steps += 1
        position.step += 1
        position.batch += 1
        mean = position.loss_sum / position.loss_steps
        if position.step % LOG_EVERY == 0 or position.step == self.num_steps:
            self._log({"step": position.step, "loss": mean, "learning_rate": rate})
            position.loss_sum, position.loss_steps = 0.0, 0
        return mean, num_positions / max(1e-9, time.monotonic() - began)

    def _learning_rate(self, step: int) -> float:
        """Linear to the peak, then half a cosine down to MIN_RATE of it."""
        warm_up = max(1, round(self.settings.warm_up * self.num_steps))
        if step < warm_up:
            return self.settings.learning_rate * (step + 1) / warm_up
        done = (step - warm_up) / max(1, self.num_steps - warm_up)
        share = MIN_RATE + (1 - MIN_RATE) * (1 + math.cos(math.pi * done)) / 2
        return self.settings.learning_rate * share

    def _finish_epoch(self) -> dict[str, Any]:
        held_out = self.trainer.evaluate(self.corpus.held_out)
        position = self.position
        position.epoch += 1
        position.batch = 0
        metrics = {"epoch": position.epoch, "step": position.step, **held_out}
        config = {**self.export, "epoch": position.epoch, **held_out}
        self.trainer.save(self.out / f"epoch-{position.epoch}", config)
        if held_out["accepted_length"] > position.best:
            position.best = held_out["accepted_length"]
            self.trainer.save(self.out, config)
        self._log(metrics)
        self.save()
        return metrics

    def _log(self, line: Mapping[str, Any]) -> None:
        with (self.out / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _resume(self) -> None:
        found = training_state.load(
            self.out, self.trainer.parameters, self._optimiser, self.identity
        )
        if found is None:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / METRICS_FILE).unlink(missing_ok=True)
            return
        self.position = Position(**found)
        self.is_resumed = True
        # Lines written after the state was saved will be written again.
        kept = [line for line in read_metrics(self.out) if self._is_before(line)]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        (partial := self.out / f"{METRICS_FILE}.partial").write_text(text, encoding="utf-8")
        partial.replace(self.out / METRICS_FILE)

    def _is_before(self, line: Mapping[str, Any]) -> bool:
        if "epoch" in line:
            return bool(line["epoch"] <= self.position.epoch)
        return bool(line["step"] <= self.position.step)


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The whole lines of a training's metrics: steps, and epochs, which have an `epoch`."""
    lines = []
    try:
        text = (out / METRICS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue  # cut off when the machine stopped
    return lines


def last_epoch(out: Path) -> dict[str, Any]:
    """Metrics of the last finished epoch. Raises UsageError if there is none."""
    epochs = [line for line in read_metrics(out) if "epoch" in line]
    if not epochs:
        raise UsageError(f"{out} holds no finished epoch; remove it and train again")
    return epochs[-1]
