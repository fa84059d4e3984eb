"""OpenVinoLoop: a closed loop over OpenVINO GenAI's continuous batching, lookup included."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.evals.crossover.loop_run import LoopRun
from specdec.evals.crossover.steady_state import SteadyState
from specdec.evals.crossover.workloads import Task
from specdec.evals.latency.contender import Question
from specdec.evals.latency.openvino_peer import asked, properties

# Tokens of a step: of 16 streams it was faster with these than with its default of 256, in each of
# four comparisons.
MAX_BATCHED = 2048


class OpenVinoPipeline:
    """One pipeline; settings of its prompt lookup share one.

    Example: `OpenVinoPipeline(Path("exported"), with_lookup=True)`.
    """

    def __init__(self, folder: Path, *, with_lookup: bool) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # or a prompt asked again would be found there
        scheduler.max_num_batched_tokens = MAX_BATCHED
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", properties(with_lookup=with_lookup)
        )
        self._ids = count()

    def add(self, question: Question, lookup: int | None) -> Any:
        """Begin a request; gives its handle."""
        return self._pipeline.add_request(next(self._ids), *asked(question, lookup))

    def step(self) -> None:
        """One step of all its requests."""
        self._pipeline.step()

    def drain(self) -> None:
        """Step until nothing is left."""
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


class OpenVinoLoop:
    """Steps a pipeline as its own loop does, so that it is known when tokens come.

    Example: `OpenVinoLoop(pipeline, lookup=5).run(tasks, concurrency=8, num_requests=24)`.
    """

    def __init__(self, pipeline: OpenVinoPipeline, lookup: int | None) -> None:
        self._pipeline, self._lookup = pipeline, lookup

    def run(self, tasks: Sequence[Task], concurrency: int, num_requests: int) -> LoopRun:
        """As `ClosedLoop.run`. Raises SpecdecError for an answer of another length."""
        state = SteadyState(concurrency, num_requests)
        handles: dict[int, Any] = {}  # of those that run, by number
        answers: dict[int, list[int]] = {}

        def begin() -> None:
            number = state.begin()
            question = tasks[number % len(tasks)].question
            handles[number] = self._pipeline.add(question, self._lookup)
            answers[number] = []

        for _ in range(concurrency):
            begin()
        while not state.is_over:
            self._pipeline.step()
            now = time.perf_counter()
            for number in list(handles):
                new = _new_tokens(handles[number])
                answers[number] += new
                wanted = tasks[number % len(tasks)].question.num_tokens
                is_last = len(answers[number]) == wanted
                state.note(number, len(new), now, is_last=is_last)
                if is_last:
                    del handles[number]
                    begin()
                elif len(answers[number]) > wanted or _has_ended(handles[number]):
                    raise SpecdecError(
                        f"openvino answered with {len(answers[number])} tokens instead of "
                        f"{wanted}: it cannot be compared"
                    )
        for handle in handles.values():
            handle.stop()
        self._pipeline.drain()
        return state.run([tuple(answers[number]) for number in range(num_requests)])


def _new_tokens(handle: Any) -> list[int]:
    """What a request has had since it was last asked; reading waits where there is nothing."""
    new: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            new += output.generated_ids
    return new


def _has_ended(handle: Any) -> bool:
    import openvino_genai

    return bool(handle.get_status() != openvino_genai.GenerationStatus.RUNNING)
