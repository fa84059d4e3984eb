"""Recorded steps: buckets, and tables that are loaded before every replay and never mixed up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec import cuda_graphs
from specdec.cuda_graphs import ROW_BUCKETS, Caller, CudaRecorder, RecordedSteps, row_bucket
from tests.kernels.device import DEVICE, needs_gpu


@given(num_rows=st.integers(1, 3000), multiple=st.sampled_from([1, 8, 64]))
def test_row_bucket_is_the_smallest_that_holds_the_rows(num_rows: int, multiple: int) -> None:
    bucket = row_bucket(num_rows, multiple)
    assert bucket >= num_rows and bucket % multiple == 0
    smaller = [b for b in ROW_BUCKETS if num_rows <= b < bucket and b % multiple == 0]
    assert not smaller
    if bucket not in ROW_BUCKETS:
        assert num_rows > ROW_BUCKETS[-1] and bucket - num_rows < multiple


class Tape:
    """Records like a graph: what it replays is fixed when it is recorded, tensors by address."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.num_recorded += 1
        out = step()

        def replay() -> Tensor:
            self.num_replayed += 1
            out.copy_(step())
            return out

        return replay


def fill(value: float) -> Callable[[Tensor], None]:
    """Loads a table with one number."""

    def load(table: Tensor) -> None:
        table.fill_(value)

    return load


def doubles(recorder: cuda_graphs.Recorder[Tensor]) -> RecordedSteps[int, Tensor, Tensor]:
    """Steps that double a table of the size's length."""
    return RecordedSteps(recorder, lambda size: torch.zeros(size), lambda table: table * 2)


def test_a_size_is_recorded_once_and_replayed_on_new_content() -> None:
    tape = Tape()
    steps = doubles(tape)
    assert steps.run(3, fill(1)).tolist() == [2, 2, 2]
    assert steps.run(2, fill(5)).tolist() == [10, 10]
    assert steps.run(3, fill(7)).tolist() == [14, 14, 14]
    assert (tape.num_recorded, tape.num_replayed, len(steps)) == (2, 3, 2)


def test_the_least_recently_used_size_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    tape = Tape()
    steps = doubles(tape)
    for size in (1, 2, 1, 3, 1):  # 3 drives out 2, for 1 was used since
        steps.run(size, fill(1))
    assert tape.num_recorded == 3 and len(steps) == 2
    steps.run(2, fill(1))
    assert tape.num_recorded == 4


def test_without_a_gpu_a_step_is_simply_called() -> None:
    calls: list[int] = []

    def step(table: Tensor) -> Tensor:
        calls.append(len(table))
        return table + 1

    steps: RecordedSteps[int, Tensor, Tensor] = RecordedSteps(
        Caller(), lambda size: torch.zeros(size), step
    )
    for value in (1.0, 2.0):
        got = steps.run(4, fill(value))
        assert got.tolist() == [value + 1] * 4
    assert calls == [4, 4]


@needs_gpu
def test_a_cuda_graph_replays_on_new_content() -> None:
    steps: RecordedSteps[int, Tensor, Tensor] = RecordedSteps(
        CudaRecorder(), lambda size: torch.zeros(size, device=DEVICE), lambda table: table * 2
    )
    for value in (1.0, 2.0, 3.0):
        got = steps.run(4, fill(value))
        assert got.tolist() == [2 * value] * 4
