"""CUDA graphs: a step recorded once per size and replayed; elsewhere simply called again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch

ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_GRAPHS = 64  # the least recently used one makes room

Key = TypeVar("Key", bound=Hashable)
Tables = TypeVar("Tables")
Result = TypeVar("Result")


def row_bucket(num_rows: int, multiple: int = 1) -> int:
    """The smallest bucket of at least `num_rows` rows that is a multiple of `multiple`.

    Above the largest bucket, where a step is not worth recording, the next multiple.

    Example: `row_bucket(17) == 24`, `row_bucket(17, 64) == 64`, `row_bucket(300, 64) == 320`.
    """
    for bucket in ROW_BUCKETS:
        if bucket >= num_rows and bucket % multiple == 0:
            return bucket
    return -(-num_rows // multiple) * multiple


class Recorder(Protocol[Result]):
    """Turns a step over static tensors into one that can be run again and again."""

    def record(self, step: Callable[[], Result]) -> Callable[[], Result]:
        """Run the step once; return what runs it again on the tensors' new content."""


class Caller:
    """Records nothing: calls the step again. For the CPU and for the tests."""

    def record(self, step: Callable[[], Result]) -> Callable[[], Result]:
        return step


class CudaRecorder:
    """Captures a step as a CUDA graph: one launch instead of hundreds."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()  # graphs never run at once: one memory for all
        self._side = torch.cuda.Stream()  # one, for cuBLAS keeps a workspace per stream

    def record(self, step: Callable[[], Result]) -> Callable[[], Result]:
        # Kernels are compiled and libraries set up before the capture, which allows neither.
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            step()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = step()

        def replay() -> Result:
            graph.replay()
            return out

        return replay


class RecordedSteps(Generic[Key, Tables, Result]):
    """Recorded steps by size: the tables that a step reads, and how to run it.

    make_tables: allocates the static tensors of a size; step: what to record over them, given
    those tables.
    """

    def __init__(
        self,
        recorder: Recorder[Result],
        make_tables: Callable[[Key], Tables],
        step: Callable[[Tables], Result],
    ) -> None:
        self._recorder = recorder
        self._make_tables = make_tables
        self._step = step
        self._recorded: OrderedDict[Key, tuple[Tables, Callable[[], Result]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, size: Key, load: Callable[[Tables], None]) -> Result:
        """Load the tables of this size, recording the step first if it is new, and run it.

        The result is valid until the next run of any size: recordings share their memory.
        """
        found = self._recorded.get(size)
        if found is None:
            tables = self._make_tables(size)
            load(tables)
            found = (tables, self._recorder.record(lambda: self._step(tables)))
            self._recorded[size] = found
            if len(self._recorded) > MAX_GRAPHS:
                self._recorded.popitem(last=False)
        else:
            load(found[0])
        self._recorded.move_to_end(size)
        return found[1]()
