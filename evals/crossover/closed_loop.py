"""ClosedLoop: so many streams of an engine at all times, each followed by the next as it ends.

What is measured is the steady state (steady_state.py), here step by step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.evals.crossover.loop_run import LoopRun, LoopStep
from specdec.evals.crossover.steady_state import SteadyState
from specdec.evals.crossover.workloads import Task
from specdec.kernels.batch import Batch
from specdec.plan import StepPlan
from specdec.request import Request, RequestOutput
from specdec.tree import DraftTree

_request_numbers = count()


class ClosedLoop:
    """Runs an engine's steps, in this process and without a server.

    Example: `ClosedLoop(engine).run(tasks, concurrency=8, num_requests=24).tokens_per_second`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._packed: tuple[StepPlan, Sequence[DraftTree], int] | None = None
        self._pack = engine.runner.pack
        engine.runner.pack = self._noted  # type: ignore[method-assign]  # to see what the engine does

    def _noted(self, plan: StepPlan, trees: Sequence[DraftTree]) -> Batch:
        batch = self._pack(plan, trees)
        self._packed = plan, trees, batch.num_rows
        return batch

    def run(self, tasks: Sequence[Task], concurrency: int, num_requests: int) -> LoopRun:
        """Keep `concurrency` streams until the first `num_requests` have ended; abort the rest.

        Tasks are taken in order and over again. Raises SpecdecError if the engine fails one.
        """
        engine, steps = self._engine, list[LoopStep]()
        state = SteadyState(concurrency, num_requests)
        requests: list[Request] = []
        numbers: dict[str, int] = {}  # of all that were begun, by request id

        def begin() -> None:
            number = state.begin()
            request = tasks[number % len(tasks)].request(f"loop-{next(_request_numbers)}")
            requests.append(request)
            numbers[request.request_id] = number
            engine.add(request)

        for _ in range(concurrency):
            begin()
        before = time.perf_counter()
        while not state.is_over:
            outputs = engine.step()
            now = time.perf_counter()
            if state.is_steady:
                steps.append(self._step(now - before, outputs))
            before = now
            for output in outputs:
                if output.error is not None:
                    raise SpecdecError(output.error)
                is_last = output.finish_reason is not None
                state.note(numbers[output.request_id], len(output.tokens), now, is_last=is_last)
                if is_last:
                    begin()
        for request in requests:
            engine.abort(request.request_id)  # those that ended are unknown to it
        engine.step()
        answers = [tuple(request.output_ids) for request in requests[:num_requests]]
        return state.run(answers, steps)

    def _step(self, seconds: float, outputs: Sequence[RequestOutput]) -> LoopStep:
        assert self._packed is not None, "a step with streams packs a batch"
        plan, trees, num_rows = self._packed
        # A step of prefill chunks alone decides nothing.
        decision = self._engine.controller.decisions[-1] if trees else None
        return LoopStep(
            seconds=seconds,
            num_tokens=sum(len(output.tokens) for output in outputs),
            num_rows=num_rows,
            num_prefill=plan.num_prefill,
            num_requests=len(trees),
            num_nodes=sum(tree.num_nodes - 1 for tree in trees),
            reason=decision.reason.value if decision else "",
            decide_s=decision.decide_s if decision else 0.0,
        )
