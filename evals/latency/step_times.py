"""StepTimes: engine steps of so many rows behind so long a context, and of several streams."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

from specdec.config import EngineConfig
from specdec.drafting import Drafter
from specdec.engine import Engine
from specdec.evals.latency.floor import Floor
from specdec.evals.latency.read_bandwidth import Bandwidth
from specdec.evals.latency.step_clock import StepClock, StepTime
from specdec.evals.report.spread import ratio_of_rounds, spread_ms
from specdec.loading import LoadedModel
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import ROOT_SOURCE, DraftTree

REACH = 8  # a parent stands at most this far before its child
STREAM_CONTEXT = 64
_request_numbers = count()


class SizedDrafter(Drafter):
    """Drafts trees of `num_nodes` nodes, root included, of random tokens: few are accepted."""

    name = "sized"

    def __init__(self, vocab_size: int) -> None:
        self.num_nodes = 1
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """See Drafter."""
        return [self._tree(step) for step in steps]

    def _tree(self, step: DecodeStep) -> DraftTree:
        num_drafted = min(self.num_nodes - 1, step.node_budget)
        draw = self._random.randrange
        return DraftTree(
            (step.root, *(draw(self._vocab_size) for _ in range(num_drafted))),
            (-1, *(draw(max(0, node - REACH), node) for node in range(1, num_drafted + 1))),
            (1.0,) * (1 + num_drafted),
            ((ROOT_SOURCE,), *((self.name,) for _ in range(num_drafted))),
        )


class StepBench:
    """An engine whose steps have the size that is asked for, with a clock around it.

    Contexts are random tokens. A context is computed once and found in the prefix cache when it
    is asked for again; the steps taken behind it make it a little longer.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self._vocab_size = loaded.model.config.vocab_size
        self._drafter = SizedDrafter(self._vocab_size)
        fixed = replace(config, control="fixed")  # or less than asked for would be verified
        self._engine = Engine(fixed, loaded=loaded, drafter=self._drafter)
        self._clock = StepClock(self._engine)

    def steps(self, context: int, rows: Sequence[int], repeats: int) -> dict[int, list[StepTime]]:
        """`repeats` decode steps for each number of rows, which is a tree's number of nodes."""
        found = {}
        with self._decoding([context]):
            for num_rows in rows:
                self._drafter.num_nodes = num_rows
                found[num_rows] = self._decode(num_rows, repeats)
        return found

    def tokens_per_second(self, num_streams: int, repeats: int) -> float:
        """Of all streams together, over `repeats` steps of plain decoding."""
        with self._decoding([STREAM_CONTEXT] * num_streams):
            steps = self._decode(num_streams, repeats)
        return num_streams * repeats / sum(step.total_s for step in steps)

    @contextmanager
    def _decoding(self, contexts: Sequence[int]) -> Iterator[None]:
        """A request behind each context, past its prompt; aborted in the end."""
        engine = self._engine
        self._drafter.num_nodes = 1
        requests = [self._request(context, stream) for stream, context in enumerate(contexts)]
        for request in requests:
            engine.add(request)
        while not all(request.output for request in requests):
            engine.step()
        yield
        for request in requests:
            engine.abort(request.request_id)
        engine.step()

    def _request(self, context: int, seed: int) -> Request:
        draw = random.Random(seed).randrange
        prompt = tuple(draw(self._vocab_size) for _ in range(context))
        params = SamplingParams(max_tokens=self._engine.max_model_len, ignore_eos=True)
        return Request(f"bench-{next(_request_numbers)}", prompt, params)

    def _decode(self, num_rows: int, repeats: int) -> list[StepTime]:
        for _ in range(repeats):
            outputs = self._engine.step()
            assert not any(output.finish_reason for output in outputs), "the context is too long"
        steps = self._clock.steps[-repeats:]
        self._clock.steps.clear()
        assert all(step.is_decode and step.num_rows == num_rows for step in steps)
        return steps


def fitting_contexts(
    contexts: Sequence[int], rows: Sequence[int], repeats: int, max_model_len: int
) -> list[int]:
    """The contexts that leave room for their steps; half of what fits where none does.

    Twice as much as the steps need if nothing is accepted.
    """
    longest = max_model_len - max(rows) - 2 * len(rows) * repeats
    return [context for context in contexts if context <= longest] or [max(1, longest // 2)]


@dataclass(frozen=True)
class StepCell:
    """Steps of one size behind one context: those of each round, beside that round's bandwidth."""

    context: int
    rows: int
    rounds: Sequence[Sequence[StepTime]]

    def summary(self, floor: Floor, bandwidths: Sequence[Bandwidth]) -> dict[str, object]:
        """Percentiles in ms over all steps, and the ratios to the floor, round by round.

        `step_per_floor` compares the median step with reading the weights at the round's best
        bandwidth; `_with_kv` adds the context's keys and values to what must be read, and
        `floor_share` is what part of the step that reading alone would take. `rounds_ms` are the
        medians of each round.
        """
        weights = [floor.seconds(bandwidth.best) for bandwidth in bandwidths]
        with_kv = [floor.seconds(bandwidth.best, self.context) for bandwidth in bandwidths]
        steps = [statistics.median(s.total_s for s in round_) for round_ in self.rounds]
        forwards = [statistics.median(s.parts["forward"] for s in round_) for round_ in self.rounds]
        every = [step for round_ in self.rounds for step in round_]
        per_floor_with_kv = ratio_of_rounds(steps, with_kv)
        return {
            "context": self.context,
            "rows": self.rows,
            "num_steps": len(every),
            "forward_ms": spread_ms([step.parts["forward"] for step in every]),
            "step_ms": spread_ms([step.total_s for step in every]),
            "floor_ms": round(1e3 * statistics.median(weights), 3),
            "floor_with_kv_ms": round(1e3 * statistics.median(with_kv), 3),
            "forward_per_floor": round(ratio_of_rounds(forwards, weights), 3),
            "step_per_floor": round(ratio_of_rounds(steps, weights), 3),
            "step_per_floor_with_kv": round(per_floor_with_kv, 3),
            "floor_share": round(1 / per_floor_with_kv, 3),
            "rounds_ms": [round(1e3 * seconds, 4) for seconds in steps],
        }
