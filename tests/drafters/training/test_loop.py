"""The training loop: stopped anywhere, gone on with, and bit for bit the same."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafters.training import curves, training_state
from specdec.drafters.training.loop import (
    MIN_RATE,
    Interrupted,
    LoopSettings,
    TrainingLoop,
    last_epoch,
    read_metrics,
)
from specdec.drafters.training.medusa_trainer import MedusaOptions, MedusaTrainer
from specdec.drafters.training.small_model_trainer import SmallModelOptions, SmallModelTrainer
from specdec.drafters.training.toy_corpus import write_toy_corpus
from specdec.drafters.training.workplace import Workplace
from specdec.errors import CheckpointError, UsageError

SETTINGS = LoopSettings(epochs=2, learning_rate=0.01, batch_tokens=200, seed=3)


class Silent:
    """A report that only counts."""

    def __init__(self) -> None:
        self.steps = 0
        self.epochs: list[Mapping[str, Any]] = []

    def step(self, done: int, total: int, loss: float, rate: float) -> None:
        self.steps += 1
        assert 0 < done <= total
        assert rate > 0

    def epoch(self, number: int, metrics: Mapping[str, Any]) -> None:
        self.epochs.append(metrics)
        assert number == metrics["epoch"]


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = write_toy_corpus(tmp_path_factory.mktemp("corpus"), 60)
    return Workplace.open(folder, vocabulary=36, precision=request.param, threads=1)


def make_loop(
    place: Workplace,
    out: Path,
    kind: str = "medusa",
    settings: LoopSettings = SETTINGS,
    save_minutes: float = 1e9,
) -> TrainingLoop:
    trainer: MedusaTrainer | SmallModelTrainer
    options: MedusaOptions | SmallModelOptions
    if kind == "medusa":
        options = MedusaOptions(num_heads=2)
        trainer = MedusaTrainer(place.target, place.projection, options)
    else:
        options = SmallModelOptions((0, -1))
        trainer = SmallModelTrainer(place.target, place.projection, options, settings.seed)
    return place.loop(trainer, kind, options, settings, out, save_minutes)


def after(steps: int) -> Any:
    """Asks to stop after so many steps."""
    left = iter(range(steps - 1))
    return lambda: next(left, None) is None


def weights(loop: TrainingLoop) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in loop.trainer.parameters.items()}


def assert_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("kind", ["medusa", "small-model"])
def test_interruptions_lose_nothing(place: Workplace, kind: str, tmp_path: Path) -> None:
    whole = make_loop(place, tmp_path / "whole", kind)
    expected = whole.run(Silent())
    per_epoch = len(whole._orders[0])
    assert per_epoch > 3
    num_interruptions = 0
    # In the middle of an epoch, at its last step, and at once after going on.
    for steps in (2, per_epoch - 2, 1, 10**6):
        loop = make_loop(place, tmp_path / "parts", kind)
        assert loop.is_resumed == (num_interruptions > 0)
        try:
            metrics = loop.run(Silent(), is_stopped=after(steps))
        except Interrupted:
            num_interruptions += 1
    assert num_interruptions == 3
    assert_equal(weights(loop), weights(whole))
    assert metrics == expected
    assert read_metrics(tmp_path / "parts") == read_metrics(tmp_path / "whole")
    for file in ("model.safetensors", "medusa_lm_head.safetensors", "config.json"):
        for folder in (".", "epoch-1", "epoch-2"):
            ours, theirs = (tmp_path / run / folder / file for run in ("parts", "whole"))
            assert ours.exists() == theirs.exists()
            if ours.exists():
                assert ours.read_bytes() == theirs.read_bytes()


def test_killed_it_goes_on_from_the_last_saved_state(place: Workplace, tmp_path: Path) -> None:
    expected = make_loop(place, tmp_path / "whole", settings=LONG).run(Silent())
    loop = make_loop(place, tmp_path / "parts", settings=LONG)
    with pytest.raises(Interrupted):
        loop.run(Silent(), is_stopped=after(8))
    loop = make_loop(place, tmp_path / "parts", settings=LONG)
    with pytest.raises(_Killed):
        loop.run(_Killer(8))  # beyond a line of metrics, without saving
    with (tmp_path / "parts" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 17, "lo')
    loop = make_loop(place, tmp_path / "parts", settings=LONG)
    assert loop.position.step == 8
    assert loop.run(Silent()) == expected
    assert read_metrics(tmp_path / "parts") == read_metrics(tmp_path / "whole")


LONG = LoopSettings(epochs=1, learning_rate=0.01, batch_tokens=40, seed=3)


class _Killed(Exception):
    pass


class _Killer(Silent):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def step(self, done: int, total: int, loss: float, rate: float) -> None:
        self._left -= 1
        if not self._left:
            raise _Killed


def test_it_saves_every_few_minutes(place: Workplace, tmp_path: Path) -> None:
    loop = make_loop(place, tmp_path, save_minutes=0.0)
    with pytest.raises(_Killed):
        loop.run(_Killer(3))
    assert make_loop(place, tmp_path).position.step == 2  # killed before the third was saved


def test_a_finished_training_is_not_done_again(place: Workplace, tmp_path: Path) -> None:
    metrics = make_loop(place, tmp_path).run(Silent())
    again = Silent()
    assert make_loop(place, tmp_path).run(again) == metrics == last_epoch(tmp_path)
    assert again.steps == 0


def test_it_learns(place: Workplace, tmp_path: Path) -> None:
    settings = LoopSettings(epochs=6, learning_rate=0.02, batch_tokens=60)
    report = Silent()
    make_loop(place, tmp_path, settings=settings).run(report)
    assert len(report.epochs) == 6
    # In greedy toy texts each token says the next one; 4 of 40 tokens cannot be drafted.
    assert report.epochs[-1]["greedy"]["top_2"][0] > 0.8 > report.epochs[0]["greedy"]["top_1"][0]
    best = max(epoch["accepted_length"] for epoch in report.epochs)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["accepted_length"] == best
    assert len(config["ranks"]) == 2


def test_another_training_is_not_gone_on_with(place: Workplace, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        make_loop(place, tmp_path).run(Silent(), is_stopped=after(2))
    other = LoopSettings(epochs=3, learning_rate=0.01, batch_tokens=200, seed=3)
    with pytest.raises(UsageError, match="epochs 2 -> 3"):
        make_loop(place, tmp_path, settings=other)
    with pytest.raises(UsageError, match="kind 'medusa' -> 'small-model'"):
        make_loop(place, tmp_path, "small-model")


def test_a_damaged_state_is_refused(place: Workplace, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        make_loop(place, tmp_path).run(Silent(), is_stopped=after(2))
    file = tmp_path / training_state.FILE
    whole = file.read_bytes()
    file.with_name(f"{training_state.FILE}.partial").write_bytes(whole[:99])  # ignored
    assert make_loop(place, tmp_path).is_resumed
    file.write_bytes(whole[:-50])
    with pytest.raises(CheckpointError, match="damaged"):
        make_loop(place, tmp_path)


def test_the_learning_rate_rises_and_falls(place: Workplace, tmp_path: Path) -> None:
    loop = make_loop(place, tmp_path, settings=LONG)
    rates = [loop._learning_rate(step) for step in range(loop.num_steps)]
    peak = rates.index(max(rates))
    assert max(rates) == pytest.approx(LONG.learning_rate)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert peak <= 0.1 * loop.num_steps
    assert MIN_RATE * LONG.learning_rate <= rates[-1] < 0.1 * LONG.learning_rate


def test_curves(place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    make_loop(place, tmp_path).run(Silent())
    assert curves.plot(tmp_path) is None
    assert (tmp_path / curves.FILE).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "nothing").mkdir()
    assert curves.plot(tmp_path / "nothing") is None  # a training of no steps yet
    reason = curves.plot(tmp_path / "missing")
    assert reason is not None
    assert "cannot write" in reason


def test_without_matplotlib_curves_are_missed_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        curves, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    assert curves.plot(tmp_path) == curves.NO_PLOT
