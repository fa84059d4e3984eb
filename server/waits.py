"""Waits: requests whose first token has not come, and what is done when it does."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.server.admission import Place
from specdec.server.deadlines import Deadlines
from specdec.server.generation import Preparation
from specdec.server.messages import Output


@dataclass(frozen=True)
class _Wait:
    place: Place
    prompt: int
    deadlines: Deadlines


class Waits:
    """Told of every output as it arrives: it gives up places in the queue and stops clocks.

    Example: `waits.begin(preparation, place, deadlines)` when requests go to the engine.
    """

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def begin(self, preparation: Preparation, place: Place, deadlines: Deadlines) -> None:
        """Requests go to the engine."""
        for index, submit in enumerate(preparation.submits):
            prompt = index // preparation.num_choices
            self._waits[submit.request_id] = _Wait(place, prompt, deadlines)

    def take(self, output: Output) -> None:
        """An output has arrived."""
        wait = self._waits.get(output.request_id)
        if wait is None:
            return
        if output.has_begun:
            wait.deadlines.begin()
        if output.tokens:
            wait.deadlines.first_token()
        if output.tokens or output.finish_reason is not None:
            self.abort(output.request_id)

    def abort(self, request_id: str) -> None:
        """A request waits no more; unknown ids are ignored."""
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            wait.place.leave_one(wait.prompt)
