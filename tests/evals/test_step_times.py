"""Steps of a given size, the clock around an engine, the floor, and the arithmetic of ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

from specdec.config import Backend, EngineConfig
from specdec.evals.latency.floor import Floor
from specdec.evals.latency.read_bandwidth import Bandwidth, ReadBandwidth
from specdec.evals.latency.step_clock import PARTS, StepClock, StepTime, breakdown
from specdec.evals.latency.step_times import StepBench, StepCell, fitting_contexts
from specdec.evals.report.spread import percentile, ratio_of_rounds, spread_ms
from specdec.native_model import NativeModel
from specdec.params import SamplingParams
from specdec.request import Request
from tests.evals.toy_folder import load_or_skip, toy_config, write_toy
from tests.toy import run_all, toy_engine, toy_model

BACKENDS: tuple[Backend, ...] = ("torch", "native")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("steps") / "model")


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, p) for p in (50, 90, 99, 100)] == [50.0, 90.0, 99.0, 100.0]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0
    assert spread_ms([0.003, 0.001]) == {"p50": 1.0, "p90": 3.0, "p99": 3.0}


def test_a_ratio_of_rounds_does_not_see_drift() -> None:
    """Both sides three times slower in the second round."""
    assert ratio_of_rounds([2.0, 6.0], [1.0, 3.0]) == 2.0
    assert ratio_of_rounds([6.0, 2.0], [1.0, 3.0]) != 2.0  # rounds mixed up


def step_time(total_ms: float, forward_ms: float = 0.5, rows: int = 1) -> StepTime:
    parts = dict.fromkeys(PARTS, 0.0) | {"forward": forward_ms / 1e3}
    return StepTime(total_ms / 1e3, parts, 1e-5, rows, is_decode=True)


def test_a_step_is_compared_with_the_bandwidth_of_its_own_round() -> None:
    floor = Floor(weight_bytes=1_000_000, kv_bytes=10_000.0)
    bandwidths = [Bandwidth(best=1e9, median=1.0), Bandwidth(best=0.5e9, median=1.0)]
    rounds = [[step_time(2.0), step_time(2.0, 1.0)], [step_time(4.0, 2.0), step_time(4.0, 1.0)]]
    found = StepCell(100, 1, rounds).summary(floor, bandwidths)
    assert found["step_per_floor"] == 2.0  # 2 ms / 1 ms, and 4 ms / 2 ms
    assert found["forward_per_floor"] == 0.75  # 0.75 ms / 1 ms, and 1.5 ms / 2 ms
    assert found["step_per_floor_with_kv"] == 1.0  # the context is as large as the weights
    assert (found["floor_ms"], found["floor_with_kv_ms"], found["num_steps"]) == (1.5, 3.0, 4)
    assert found["step_ms"] == {"p50": 2.0, "p90": 4.0, "p99": 4.0}
    assert found["floor_share"] == 1.0 and found["rounds_ms"] == [2.0, 4.0]
    slow = StepCell(100, 1, [[step_time(8.0)], [step_time(16.0)]]).summary(floor, bandwidths)
    assert slow["floor_share"] == 0.25  # 2 ms of reading in 8 ms
    swapped = StepCell(100, 1, rounds).summary(floor, bandwidths[::-1])
    assert swapped["step_per_floor"] != 2.0


def test_contexts_leave_room_for_their_steps() -> None:
    assert fitting_contexts((200, 2000, 6000), (1, 64), 4, 8192) == [200, 2000, 6000]
    assert fitting_contexts((200, 2000, 6000), (1, 64), 4, 6079) == [200, 2000]  # one too few
    assert fitting_contexts((200, 2000, 6000), (1, 64), 4, 6080) == [200, 2000, 6000]
    assert fitting_contexts((200,), (1, 3), 2, 111) == [50]


def test_bandwidth_is_bytes_by_the_seconds_of_a_pass() -> None:
    seconds = iter([2.0, 1.0, 4.0])
    sizes = []

    def read(buffer: Tensor) -> float:
        sizes.append(buffer.nbytes)
        return next(seconds)

    found = ReadBandwidth(toy_model().model, num_bytes=4096, read=read).measure(3)
    assert found == Bandwidth(best=4096.0, median=2048.0)
    assert sizes == [4096] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_floor_counts_what_is_in_memory(folder: Path, backend: Backend) -> None:
    loaded = load_or_skip(toy_config(folder, backend))
    floor = Floor.of(loaded.model, "auto", 32)
    shape = loaded.model.config
    assert floor.kv_bytes == 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    assert floor.seconds(1e3, context=3) == (floor.weight_bytes + 3 * floor.kv_bytes) / 1e3
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors").values()
    matrices = sum(tensor.nbytes for tensor in tensors if tensor.ndim == 2)
    if isinstance(loaded.model, NativeModel):
        assert floor.weight_bytes == loaded.model.weights.num_bytes > matrices
    else:
        assert floor.weight_bytes == matrices


@pytest.mark.parametrize("backend", BACKENDS)
def test_bandwidth_is_measured_with_the_forwards_threads(folder: Path, backend: Backend) -> None:
    loaded = load_or_skip(toy_config(folder, backend))
    bandwidth = ReadBandwidth(loaded.model, num_bytes=2**20)
    assert bandwidth.num_threads == 1
    found = bandwidth.measure(3)
    assert found.best >= found.median > 0


def request(number: int) -> Request:
    return Request(f"r{number}", (1, 2, 3) * 6, SamplingParams(max_tokens=12, ignore_eos=True))


def test_a_clock_changes_nothing_and_leaves_nothing_out() -> None:
    plain, clocked = request(0), request(0)
    run_all(toy_engine(drafter_name="ngram"), [plain])
    engine = toy_engine(drafter_name="ngram")
    clock = StepClock(engine)
    run_all(engine, [clocked])
    assert clocked.output_ids == plain.output_ids
    assert len(clock.steps) == clocked.stats.num_steps > 0
    num_nodes = clocked.stats.num_draft_tokens + clocked.stats.num_steps
    num_chunk_rows = len(clocked.prompt_ids) - 1
    assert sum(step.num_rows for step in clock.steps) == num_nodes + num_chunk_rows
    assert [step.is_decode for step in clock.steps] == [False] + [True] * (len(clock.steps) - 1)
    for step in clock.steps:
        assert set(step.parts) == set(PARTS)
        assert all(seconds > 0 for seconds in step.parts.values())
        assert step.rest_s > 0 and step.deliver_s > 0
    assert engine.step() == [] and len(clock.steps) == clocked.stats.num_steps  # nothing to do


def test_a_breakdown_holds_the_whole_step() -> None:
    found = breakdown([step_time(2.0, 0.5), step_time(2.0, 0.5, rows=4)])
    assert (found["forward"], found["rest"], found["step"], found["rows"]) == (0.5, 1.5, 2.0, 2.5)
    assert sum(found[part] for part in PARTS) + found["rest"] == found["step"]
    assert breakdown([]) == {}


def test_a_step_is_kept_as_json() -> None:
    step = step_time(2.0, rows=4)
    assert StepTime.from_json(json.loads(json.dumps(step.as_json()))) == step


def test_steps_have_the_size_that_is_asked_for() -> None:
    config = EngineConfig(node_budget=15, block_size=16, kv_memory_mib=4)
    bench = StepBench(toy_model(), config)
    for _ in range(2):  # the second time with the context in the prefix cache
        found = bench.steps(40, (1, 5, 16), 3)
        assert {rows: len(steps) for rows, steps in found.items()} == {1: 3, 5: 3, 16: 3}
        assert all(step.num_rows == rows for rows, steps in found.items() for step in steps)
    assert bench.tokens_per_second(3, 2) > 0
    with pytest.raises(AssertionError):
        bench.steps(40, (17,), 1)  # more nodes than the budget
