"""Precision: what loses nothing, which of it is faster, and that it is measured once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import machine_cache
from specdec.config import EngineConfig, WeightPrecision
from specdec.kernels.batch import Batch
from specdec.model_config import ModelConfig
from specdec.native_model import NativeModel
from specdec.precision import load_fastest, own_integers
from specdec.target import Target
from tests.toy import CONFIG

SHAPE = ModelConfig.from_checkpoint(CONFIG)
Q4, Q8 = 20, 34  # bytes of a group of 32


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine_cache, "cache_folder", lambda: tmp_path)
    return tmp_path / "precision"


class Held:
    """Tensors of these shapes by name."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._shapes = {name.replace("__", "."): shape for name, shape in shapes.items()}

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def get(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], dtype=torch.uint8)


WEIGHTS = Held(
    model__embed_tokens__weight=(8, 64),
    model__norm__weight=(64,),
    model__layers__0__x__weight=(4, 64),
    model__layers__1__x__weight=(4, 96),
)


@pytest.mark.parametrize(
    ("embedding", "first", "second", "found"),
    [
        (2 * Q8, 2 * Q4, 3 * Q4, "int4"),
        (2 * Q8, 2 * Q8, 3 * Q8, "int8"),
        (2 * Q4, 2 * Q4, 3 * Q4, None),  # an int4 embedding would be rounded anew
        (2 * Q8, 2 * Q4, 3 * Q8, None),
        (2 * Q8, 2 * Q4, 2 * Q4, None),
    ],
)
def test_integers_count_where_all_are_taken_as_they_are(
    embedding: int, first: int, second: int, found: str | None
) -> None:
    integers = Held(
        model__embed_tokens__weight=(8, embedding),
        model__layers__0__x__weight=(4, first),
        model__layers__1__x__weight=(4, second),
    )
    assert own_integers(WEIGHTS, integers) == found


def test_a_matrix_without_integers_is_a_loss() -> None:
    integers = Held(
        model__embed_tokens__weight=(8, 2 * Q8), model__layers__0__x__weight=(4, 2 * Q4)
    )
    assert own_integers(WEIGHTS, integers) is None
    assert own_integers(WEIGHTS, None) is None


class Timed(NativeModel):
    """A target whose forwards take `ms(rows)` of virtual time, but for most ten times as long."""

    def __init__(self, machine: Machine, precision: WeightPrecision) -> None:
        self.precision, self._machine, self._num_run = precision, machine, 0

    def make_kv_cache(self, kv: str, *, num_blocks: int, block_size: int) -> Any:
        assert num_blocks * block_size >= 256 + 16
        return SimpleNamespace(scrub=lambda block_ids: None)

    def forward(self, batch: Batch, cache: Any) -> Any:
        factor = 1 if 21 <= self._num_run < 24 else 10
        self._num_run += 1
        self._machine.now += factor * self._machine.ms[self.precision](batch.num_rows) / 1e3


class Machine:
    """Loads targets that take so many milliseconds by rows."""

    def __init__(self, **ms: Any) -> None:
        self.ms, self.now, self.loads = ms, 0.0, list[str]()

    def load(self, precision: WeightPrecision) -> Target:
        self.loads.append(precision)
        return Timed(self, "bf16" if precision == "auto" else precision)

    def choose(self, integers: WeightPrecision | None = "int4", **settings: Any) -> tuple[str, str]:
        config = EngineConfig(**settings)
        target, reason = load_fastest(self.load, integers, config, SHAPE, lambda: self.now)
        return target.precision, reason


def test_the_faster_precision_is_measured_once() -> None:
    machine = Machine(bf16=lambda rows: 8 + rows / 2, int4=lambda rows: 4 + rows / 2)
    told = "int4 weights, which the checkpoint was made from: 4.5 ms a step, bf16 8.5"
    assert machine.choose() == ("int4", told)
    assert machine.loads == ["auto", "int4"]
    again = Machine()
    assert again.choose() == ("int4", told)
    assert again.loads == ["int4"]
    other = Machine(bf16=lambda rows: 1.0, int4=lambda rows: 2.0)
    assert other.choose(model="another") == ("bf16", "bf16 weights: 1.0 ms a step, int4 2.0")
    assert Machine().choose(model="another")[0] == "bf16"


@pytest.mark.parametrize(("many_rows", "found"), [(10.0, "int4"), (40.0, "bf16")])
def test_crowds_count_too(many_rows: float, found: str) -> None:
    """Half the time of one row does not make up for four times that of sixteen and of four."""
    machine = Machine(bf16=lambda rows: 10.0, int4=lambda rows: 5.0 if rows == 1 else many_rows)
    assert machine.choose()[0] == found


def test_what_hardly_gains_is_left() -> None:
    machine = Machine(bf16=lambda rows: 1.0, int4=lambda rows: 0.97)
    assert machine.choose()[0] == "bf16"


def test_without_integers_there_is_no_choice(cache: Path) -> None:
    machine = Machine()
    assert machine.choose(None) == ("bf16", "")
    assert not cache.exists()


def test_pytorch_has_no_integers() -> None:
    target = SimpleNamespace(precision="bf16")
    found = load_fastest(lambda precision: target, "int4", EngineConfig(), SHAPE)
    assert found == (target, "")


@pytest.mark.parametrize(
    "kept",
    ["{", "[]", '{"bf16": [1, 1, 1]}', '{"bf16": [1, 1, 0], "int4": [1, 1, 1]}', '{"bf16": 3}'],
)
def test_a_damaged_file_is_measured_anew(cache: Path, kept: str) -> None:
    machine = Machine(bf16=lambda rows: 8.0, int4=lambda rows: 4.0)
    machine.choose()
    (file,) = cache.iterdir()
    whole = json.loads(file.read_text())
    file.write_text(
        kept if kept == "{" else json.dumps({**whole, "value": json.loads(kept)}), encoding="utf-8"
    )
    assert machine.choose()[0] == "int4"
    assert machine.loads == 2 * ["auto", "int4"]
    again = json.loads(file.read_text())
    assert again["identity"] == whole["identity"]
    assert again["value"] == {n: pytest.approx(ms) for n, ms in whole["value"].items()}
