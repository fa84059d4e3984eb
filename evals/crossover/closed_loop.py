"""ClosedLoop: so many streams at all times, each followed by the next as soon as it ends.

What is measured is the steady state. It begins when every one of the first streams has a token,
and ends when the last of the counted requests does; until then a stream that ends is followed by
the tasks over again, so that the number of streams never falls. A run down to the last stream
would mix all smaller concurrencies into the figure, and by other shares in every setting; a window
that closes with the first stream that has no successor would leave most of the answers out. Since
the first prompts are read before it begins, prompts weigh less than they do in the long run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.evals.crossover.workloads import Task
from specdec.kernels.batch import Batch
from specdec.plan import StepPlan
from specdec.request import Request, RequestOutput
from specdec.tree import DraftTree

_request_numbers = count()


@dataclass(frozen=True)
class LoopStep:
    """One step. `seconds` run from the end of the step before, so admitting requests counts."""

    seconds: float
    num_tokens: int
    num_rows: int
    num_prefill: int  # of the rows
    num_requests: int  # with a decode step
    num_nodes: int
    reason: str = ""  # the controller's; "" of a step without a decode
    decide_s: float = 0.0


@dataclass
class LoopRun:
    """The steady state's steps, and by task number the answers of all counted requests."""

    steps: list[LoopStep] = field(default_factory=list)
    answers: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Of all streams together, prompts included in the time."""
        return _rate(self.steps)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Over the steps without a prefill chunk; None if all had one."""
        steps = [step for step in self.steps if not step.num_prefill]
        return _rate(steps) if steps else None

    @property
    def rows_per_step(self) -> float:
        """Prefill chunks included."""
        return sum(step.num_rows for step in self.steps) / len(self.steps)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request gets of a step with a part for it."""
        return self._per_request(sum(step.num_tokens for step in self.steps))

    @property
    def nodes_per_request(self) -> float:
        """Draft nodes verified for a request in a step with a part for it."""
        return self._per_request(sum(step.num_nodes for step in self.steps))

    @property
    def decide_s(self) -> float:
        """Seconds per step."""
        return sum(step.decide_s for step in self.steps) / len(self.steps)

    @property
    def reasons(self) -> Counter[str]:
        """Steps by the controller's reason."""
        return Counter(step.reason for step in self.steps if step.reason)

    def _per_request(self, total: int) -> float:
        return total / max(1, sum(step.num_requests for step in self.steps))


def _rate(steps: Sequence[LoopStep]) -> float:
    return sum(step.num_tokens for step in steps) / sum(step.seconds for step in steps)


class ClosedLoop:
    """Runs an engine's steps, in this process and without a server.

    Example: `ClosedLoop(engine).run(tasks, concurrency=8, num_requests=24).tokens_per_second`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._packed: tuple[StepPlan, Sequence[DraftTree], int] | None = None
        self._pack = engine.runner.pack
        engine.runner.pack = self._noted  # type: ignore[method-assign]

    def _noted(self, plan: StepPlan, trees: Sequence[DraftTree]) -> Batch:
        batch = self._pack(plan, trees)
        self._packed = plan, trees, batch.num_rows
        return batch

    def run(self, tasks: Sequence[Task], concurrency: int, num_requests: int) -> LoopRun:
        """Keep `concurrency` streams until the first `num_requests` have ended; abort the rest.

        Tasks are taken in order and over again. Raises SpecdecError if the engine fails one.
        """
        assert num_requests >= concurrency, "the first streams must be counted"
        engine, run = self._engine, LoopRun()
        requests: list[Request] = []
        numbers: dict[str, int] = {}  # of all that were begun, by request id

        def begin() -> None:
            number = len(requests)
            request = _request(tasks[number % len(tasks)])
            requests.append(request)
            numbers[request.request_id] = number
            engine.add(request)

        for _ in range(concurrency):
            begin()
        num_left, is_steady = num_requests, False
        before = time.perf_counter()
        while num_left:
            outputs = engine.step()
            now = time.perf_counter()
            if is_steady:
                run.steps.append(self._step(now - before, outputs))
            before = now
            is_steady = is_steady or all(request.output for request in requests[:concurrency])
            for output in outputs:
                if output.error is not None:
                    raise SpecdecError(output.error)
                if output.finish_reason is not None:
                    num_left -= numbers[output.request_id] < num_requests
                    begin()
        for request in requests:
            engine.abort(request.request_id)  # those that ended are unknown to it
        engine.step()
        if not run.steps:
            raise SpecdecError("the answers ended before all streams had begun: allow more tokens")
        run.answers = [
            (number % len(tasks), tuple(request.output_ids))
            for number, request in enumerate(requests[:num_requests])
        ]
        return run

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


def _request(task: Task) -> Request:
    return Request(
        f"loop-{next(_request_numbers)}",
        task.prompt_ids,
        task.params,
        prediction_ids=task.prediction_ids,
    )
