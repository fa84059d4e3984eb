"""The start-up profile and its cache, on machines that are a formula and a clock of their own"""

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from specdec import cost_cache, machine_cache
from specdec.config import EngineConfig
from specdec.cost_profile import (
    ForwardTimer,
    measured_cost,
    non_negative_fit,
    profile,
    rows_curve,
)
from specdec.cost_table import CONTEXTS, Curve, row_points
from specdec.cuda_graphs import row_bucket
from specdec.kernels.batch import Batch
from specdec.loading import LoadedModel, make_kv_cache
from specdec.model_runner import ModelRunner
from specdec.step_cost import StepCost
from specdec.target import PagedCache, Target, TargetOutput
from tests.toy import Form, toy_model

KEY_BYTES, WEIGHT_BYTES = 1_000, 1_000_000
SHORT = CONTEXTS[0]  # what rows are measured at
CHECKED = {1, 16}  # rows of the forwards that a cached table is compared with


class FakeModel:
    """Of a target only what identifies it."""

    config = "a shape"
    precision = "bf16"
    weight_bytes = WEIGHT_BYTES
    device = torch.device("cpu")

    def kv_bytes_per_block(self, kv: str, block_size: int) -> int:
        return KEY_BYTES * block_size


class FakeCache:
    """A KV cache that only counts."""

    device = torch.device("cpu")
    block_size = 32

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.scrubbed: set[int] = set()

    def scrub(self, block_ids: list[int]) -> None:
        assert self.scrubbed.isdisjoint(block_ids)
        self.scrubbed.update(block_ids)


class Machine(ModelRunner):
    """Forwards that take curve(requests, context, rows) seconds of virtual time."""

    def __init__(self, curve: Curve, *, max_model_len: int = 8192, num_blocks: int = 512) -> None:
        self.cache = FakeCache(num_blocks)
        super().__init__(cast(Target, FakeModel()), cast(PagedCache, self.cache))
        self.curve = curve
        self.factor: Callable[[], float] = lambda: 1.0  # of the forward that runs
        self.now = 100.0
        self.rows: list[int] = []  # of each forward
        self.loaded = LoadedModel(self.model, None, (), "fake", max_model_len)

    def clock(self) -> float:
        return self.now

    def forward(self, batch: Batch) -> TargetOutput:
        assert len(batch.logit_rows) == batch.num_rows
        assert max(batch.positions) < self.loaded.max_model_len
        blocks = [block for segment in batch.segments for block in segment.block_ids]
        assert self.cache.scrubbed.issuperset(blocks)
        assert len(set(blocks)) == min(len(blocks), self.cache.num_blocks)  # of their own
        (context,) = {segment.root for segment in batch.segments}
        self.rows.append(batch.num_rows)
        seconds = self.curve(len(batch.segments), context, batch.num_rows)
        self.now += seconds * self.factor()
        return TargetOutput(torch.zeros(batch.num_rows, 2), torch.zeros(batch.num_rows, 2))

    def measure(self, seconds: float = 2.0, **settings: Any) -> StepCost:
        config = EngineConfig(**settings)
        return measured_cost(self.loaded, self, config, seconds=seconds, clock=self.clock)

    def profile(self, seconds: float, max_rows: int = 64, **settings: Any) -> StepCost:
        """Without the cache."""
        kind = {"is_staircase": False, "row_multiple": 1, **settings}
        rows = row_points(max_rows, **kind)
        timer = ForwardTimer(self.loaded, self, self.clock)
        deadline = self.now + seconds
        key_share = KEY_BYTES / WEIGHT_BYTES
        table, _ = profile(
            timer, rows, max_requests=16, deadline=deadline, key_share=key_share, **kind
        )
        return StepCost(table)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine_cache, "cache_folder", lambda: tmp_path)
    return tmp_path / "step-cost"


def machine_curve(num_requests: int, context: int, num_rows: int) -> float:
    keys, row_keys = num_requests * context, num_rows * context
    return 1e-3 + 1e-4 * num_rows + 1e-7 * keys + 1e-9 * row_keys + 2e-5 * num_requests


def one_row(cost: StepCost, num_rows: int) -> float:
    return float(cost.forward_s(1, SHORT, 64)[num_rows])


# Measuring.


def test_a_machine_of_the_assumed_kind_is_known_everywhere() -> None:
    cost = Machine(machine_curve).measure()
    for num_requests, context in (
        *((1, SHORT), (1, 400), (1, 5000)),
        *((3, 2000), (16, 200), (64, 1000)),
    ):
        found = cost.forward_s(num_requests, context, 256)
        for num_rows in (n for n in (1, 5, 16, 64, 200, 256) if n >= num_requests):
            expected = machine_curve(num_requests, context, num_rows)
            assert found[num_rows] == pytest.approx(expected, rel=1e-6)


def test_warm_ups_and_slow_forwards_do_not_count() -> None:
    machine = Machine(machine_curve)

    def factor() -> float:
        is_first = machine.rows[-1] not in machine.rows[:-1]
        return 10.0 if is_first or len(machine.rows) % 3 else 1.0

    machine.factor = factor
    cost = machine.profile(9.0)
    for num_rows in (1, 12, 64):
        assert one_row(cost, num_rows) == pytest.approx(machine_curve(1, SHORT, num_rows))


@pytest.mark.parametrize("scale", [1, 10, 50, 300, 1000])
def test_a_profile_ends_in_time_whatever_the_machine(scale: int) -> None:
    machine = Machine(lambda n, c, r: scale * machine_curve(n, c, r))
    started = machine.now
    cost = machine.measure(seconds=2.0)
    # The first forward is run once in any case; others are begun if they are thought to fit.
    assert machine.now - started < 2.0 + machine.curve(1, SHORT, 1)
    found = cost.forward_s(1, SHORT, 256)
    assert found[1] == pytest.approx(machine.curve(1, SHORT, 1))
    assert (np.diff(found[1:]) > 0).all()


def test_what_was_not_reached_goes_on_as_before() -> None:
    machine = Machine(lambda n, c, r: 0.02 + 0.002 * r)
    cost = machine.profile(1.2, max_rows=256)
    assert max(machine.rows) < 256
    assert cost.forward_s(1, SHORT, 256)[1:] == pytest.approx(0.02 + 0.002 * np.arange(1, 257))


def test_without_time_for_long_contexts_keys_cost_what_their_bytes_do() -> None:
    cost = Machine(lambda n, c, r: 3.0).profile(2.0)
    first, longer = (cost.forward_s(1, context, 1)[1] for context in (512, 2048))
    assert (longer - first) / 3.0 == pytest.approx(1536 * KEY_BYTES / WEIGHT_BYTES)


@pytest.mark.parametrize("row_multiple", [1, 64])
def test_a_staircase_is_measured_at_its_buckets(row_multiple: int) -> None:
    def stairs(num_requests: int, context: int, num_rows: int) -> float:
        return machine_curve(num_requests, context, row_bucket(num_rows, row_multiple))

    machine = Machine(stairs)
    cost = machine.profile(60.0, max_rows=300, is_staircase=True, row_multiple=row_multiple)
    expected = [stairs(1, SHORT, num_rows) for num_rows in range(1, 257)]
    assert cost.forward_s(1, SHORT, 256)[1:] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(2, 8), (40, 2), (160, 512)])
def test_a_small_model_is_measured_within_its_context(max_model_len: int, num_blocks: int) -> None:
    def machine() -> Machine:
        return Machine(machine_curve, max_model_len=max_model_len, num_blocks=num_blocks)

    for cost in (machine().measure(), machine().measure()):  # measured, checked
        assert (cost.forward_s(1, 10, 64) > 0).all()
    machine().profile(2.0, is_staircase=True, row_multiple=64)


def test_rows_curve() -> None:
    def curve(measured: dict[int, float], *, is_flat_allowed: bool = False) -> list[float]:
        return list(rows_curve(measured, (1, 2, 4, 8), is_flat_allowed=is_flat_allowed))

    assert curve({1: 1.0, 4: 1.3, 8: 2.0}) == pytest.approx([1.0, 1.1, 1.3, 2.0])
    assert curve({1: 1.0, 2: 1.5, 4: 1.6}) == pytest.approx([1.0, 1.5, 1.6, 1.6 + 4 * 0.2])
    assert curve({1: 1.0, 2: 1.05, 4: 1.6}) == pytest.approx([1.0, 1.05, 1.6, 1.6 + 4 * 0.275])
    assert curve({1: 1.5, 4: 1.0}) == pytest.approx([1.0, 1.0, 1.0, 1.0 + 4 / 32])
    assert curve({1: 1.5, 4: 1.0}, is_flat_allowed=True) == [1.0] * 4
    assert curve({2: 1.0}, is_flat_allowed=True) == [1.0] * 4


def test_fits_are_never_negative() -> None:
    features = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [2.0, 0.0, 0.0]])
    exact = non_negative_fit(features, features @ [0.5, 0.0, 2.0])
    assert exact == pytest.approx([0.5, 0.0, 2.0])
    assert non_negative_fit(features, np.array([1.0, -1.0, 2.0])) == pytest.approx([1.0, 0, 0])
    assert non_negative_fit(np.zeros((0, 3)), np.zeros(0)).tolist() == [0, 0, 0]


# The cache.


def test_a_second_start_checks_and_measures_no_more(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = Machine(machine_curve).measure()
    assert "measured in" in caplog.text
    again = Machine(machine_curve)
    started = again.now
    cost = again.measure()
    assert set(again.rows) == CHECKED
    assert again.now - started < 0.3
    assert cost.forward_s(3, 900, 64) == pytest.approx(first.forward_s(3, 900, 64))
    assert "cached" in caplog.messages[-1]
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    "settings", [{"block_size": 64}, {"kv": "int8"}, {"token_budget": 64}, {"deterministic": False}]
)
def test_other_settings_are_measured_anew(settings: dict[str, Any], cache: Path) -> None:
    Machine(machine_curve).measure()
    other = Machine(machine_curve)
    other.measure(**settings)
    assert len(set(other.rows)) > 2
    assert len(list(cache.iterdir())) == 2


def broken(text: str) -> dict[str, str]:
    kept = json.loads(text)
    seconds = json.dumps(kept["value"]["seconds"])
    return {
        "empty": "",
        "truncated": text[: len(text) // 2],
        "not JSON": "\0\1\2",
        "deep": "[" * 100_000,
        "no object": "[1, 2]",
        "no table": json.dumps({"identity": kept["identity"]}),
        "NaN": text.replace(seconds, seconds.replace("0.0", "NaN", 1), 1),
        "huge": text.replace(seconds, seconds.replace("[[[", "[[[1" + "0" * 400 + ", ", 1), 1),
        "negative": text.replace("[[[0", "[[[-0"),
        "foreign": json.dumps({**kept, "identity": {**kept["identity"], "device": "another"}}),
    }


@pytest.mark.parametrize("kind", list(broken('{"identity": {}, "value": {"seconds": [[[0.01]]]}}')))
def test_a_file_that_is_not_whole_counts_as_none(kind: str, cache: Path) -> None:
    Machine(machine_curve).measure()
    (file,) = cache.iterdir()
    whole = file.read_text()
    bad = broken(whole)[kind]
    assert bad != whole
    file.write_text(bad)
    machine = Machine(machine_curve)
    machine.measure()
    assert len(set(machine.rows)) > 2
    assert json.loads(file.read_text()) == json.loads(whole)


def test_a_folder_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"  # root may write anywhere else
    monkeypatch.setattr(machine_cache, "cache_folder", lambda: folder)
    assert one_row(Machine(machine_curve).measure(), 1) > 0
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "measured again" in warning.message


def test_a_full_disk_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert one_row(Machine(machine_curve).measure(), 1) > 0
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (lambda n, c, r: 2.8 * machine_curve(n, c, r), True),
        (lambda n, c, r: 3.3 * machine_curve(n, c, r), False),
        (lambda n, c, r: machine_curve(n, c, r) / 3.3, False),
        (lambda n, c, r: machine_curve(n, c, r) * (1.6 if r > 4 else 1), False),
        (lambda n, c, r: machine_curve(n, c, r) / (1.6 if r > 4 else 1), False),
        (lambda n, c, r: machine_curve(n, c, r) * (1.6 if n > 8 else 1), False),
        (lambda n, c, r: machine_curve(n, c, r) / (1.6 if n > 8 else 1), False),
    ],
)
def test_a_machine_that_differs_is_measured_again(other: Curve, is_same: bool) -> None:
    Machine(machine_curve).measure()
    machine = Machine(other)
    cost = machine.measure()
    assert (set(machine.rows) == CHECKED) == is_same
    for num_rows in (1, 16, 64):  # one that is only slower is taken to be so throughout
        assert one_row(cost, num_rows) == pytest.approx(other(1, SHORT, num_rows), rel=1e-6)


def test_a_model_is_known_by_its_numbers() -> None:
    machine, config = Machine(machine_curve), EngineConfig()
    known = cost_cache.identity(machine.loaded, config)
    assert json.loads(json.dumps(known)) == known
    machine.model.weight_bytes += 1  # type: ignore[misc]  # a FakeModel's
    assert cost_cache.identity(machine.loaded, config) != known


# A real forward.


def test_the_toy_model_is_measured(backend: Form, tmp_path: Path) -> None:
    config = EngineConfig(backend=backend.backend, block_size=16, kv_memory_mib=4)
    loaded = toy_model()
    kv_cache = make_kv_cache(config, loaded.model, loaded.max_model_len)
    runner = ModelRunner(loaded.model, kv_cache)
    for _ in range(2):  # measured, cached
        found = measured_cost(loaded, runner, config).forward_s(4, 100, 300)
        assert found.shape == (301,)
        assert (found > 0).all()
        assert (np.diff(found) >= 0).all()
