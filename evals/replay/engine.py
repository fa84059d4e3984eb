"""ReplayEngine: the engine as it is, with recorded answers in place of a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec.config import EngineConfig
from specdec.drafting import Drafter
from specdec.engine import Engine
from specdec.evals.replay.target import RecordedRunner, RecordedTarget
from specdec.evals.replay.verifier import RecordedVerifier
from specdec.loading import LoadedModel
from specdec.request import Request
from specdec.step_record import StepRecord


class ReplayEngine(Engine):
    """Plans, drafts, chooses and commits as the engine does; only forward and verdict are recorded.

    The node budget is fixed. `loaded` may be any model: only its shape is used.

    Example:
        loaded = read_model(config)
        engine = ReplayEngine(config, loaded, load_drafter(loaded, config))
        steps = engine.replay(Request("a", prompt_ids, params), output_ids)
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, drafter: Drafter) -> None:
        target = RecordedTarget(loaded.model.config, loaded.max_model_len)
        super().__init__(
            replace(
                config,
                control="fixed",
                device="cpu",
                kv="auto",
                verification="coupled",
                kv_memory_mib=(drafter.num_bytes >> 20) + 2,  # of which no block takes a share
            ),
            loaded=replace(loaded, model=target),
            drafter=drafter,
        )
        self.runner = RecordedRunner(target, self.runner.kv_cache)
        self._verifier = self._recorded = RecordedVerifier()

    def replay(self, request: Request, output_ids: Sequence[int]) -> tuple[StepRecord, ...]:
        """The records of the request's decode steps if it is answered so.

        Of an answer that goes on behind where the request ends, or ended when it was recorded, all
        records are those of a live run. Behind the end of `output_ids` nothing counts as evaluated
        or cut. Raises InvalidRequest as `add` does.
        """
        request.keeps_steps = True
        self.add(request)
        self._recorded.expect(request, output_ids)
        while not request.is_finished:
            self.step()
        return self._recorded.settle(request)
