"""Lineup: our engines and the peers, ready to answer the same prompts in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.engine import Engine
from specdec.evals.latency.answers import Answers, Place
from specdec.evals.latency.asked import first_questions, natural_lengths, of_lengths, warm_up
from specdec.evals.latency.contender import Contender, Question, checked, ours
from specdec.evals.latency.peak_memory import PeakMemory, known_bytes
from specdec.evals.latency.peers import PeerName, make_peers
from specdec.evals.latency.server_peer import ServerPeer
from specdec.evals.latency.settings import LatencySettings
from specdec.evals.latency.side import PLAIN, Side
from specdec.evals.latency.step_clock import StepClock
from specdec.evals.report.journal import Journal
from specdec.evals.report.progress import Advance
from specdec.loading import LoadedModel

ROOM = 64  # of a peer's context behind the longest answer: some want a little more
# Before an answer beside peers: threads of who answered before spin, OpenMP's for up to 0.2 s.
REST_S = 0.3


class Lineup:
    """They are made one after the other, each with an answer that warms it up, so that it is seen
    how much memory each adds. How long answers are stands in the journal of an interrupted run.

    `readers` are those who are given a prompt that is only read: speculation has no part in it.
    `chosen` says what our engines run with, and why.
    """

    def __init__(
        self,
        settings: LatencySettings,
        loaded: LoadedModel,
        memory: PeakMemory,
        servers: Mapping[str, ServerPeer],
        journal: Journal,
        advance: Advance,
    ) -> None:
        self._settings, self._loaded = settings, loaded
        self._clocks: dict[str, StepClock] = {}
        self._contenders: dict[str, Contender] = {}
        self.chosen: dict[str, dict[str, Any]] = {}
        plain = self._add(PLAIN)
        self.known_bytes = known_bytes(plain)
        asked = first_questions(settings.samples, settings.temperatures, plain)
        if "lengths" not in journal:
            lengths = natural_lengths(asked, plain, settings.max_tokens, advance)
            journal.add("lengths", lengths)
        self.asked = of_lengths(asked, journal["lengths"])
        warm = warm_up(self.asked)
        self._warm(PLAIN.name, warm)
        memory.note(PLAIN.name)
        for side in settings.sides:
            advance(side.name)
            self._add(side)
            self._warm(side.name, warm)
            memory.note(side.name)
        readers = [PLAIN.name]
        setup = settings.peer_setup(self._longest())
        for name, peers in make_peers(settings.peers, setup, servers):
            advance(name)
            for contender, peer in peers.items():
                self._contenders[contender] = checked(contender, peer)
                self._warm(contender, warm)
                if _reads(name, servers):
                    readers.append(contender)
            memory.note(name)
        self.readers = {name: self._contenders[name] for name in readers}

    def places(self, number: int) -> list[Place]:
        """Of a round's answers, in order."""
        return [Place(number, one.question.temperature, one.sample.sample_id) for one in self.asked]

    def num_runs(self, place: Place) -> int:
        """How many answer there."""
        return len(self._contenders)

    def answers(self, place: Place, advance: Advance) -> Answers:
        """Everybody's answer to one prompt; each time another one begins."""
        index = self.places(place.round).index(place)
        names = list(self._contenders)
        for clock in self._clocks.values():
            clock.steps.clear()
        first = (place.round + index) % len(names)
        runs = {}
        for name in names[first:] + names[:first]:
            advance(f"{place.key}: {name}")
            if self._settings.peers:
                time.sleep(REST_S)
            runs[name] = self._contenders[name](self.asked[index].question)
        return Answers(
            {name: runs[name] for name in names},
            {
                name: [step for step in clock.steps if step.is_decode]
                for name, clock in self._clocks.items()
            },
        )

    def _add(self, side: Side) -> Engine:
        engine = Engine(side.config(self._settings.config), loaded=self._loaded)
        self._clocks[side.name] = StepClock(engine)
        self._contenders[side.name] = checked(side.name, ours(engine))
        self.chosen[side.name] = {
            "drafter": engine.config.drafter,
            "node_budget": engine.config.node_budget,
            "control": engine.config.control,
            "reason": engine.reason,
        }
        return engine

    def _warm(self, name: str, questions: Sequence[Question]) -> None:
        for question in questions:
            self._contenders[name](question)

    def _longest(self) -> int:
        """The longest context that contenders will see."""
        questions = [one.question for one in self.asked]
        answers = [len(question.prompt_ids) + question.num_tokens for question in questions]
        longest = max(self._settings.num_read(self._loaded.max_model_len) + 1, *answers) + ROOM
        return min(longest, self._loaded.max_model_len)


def _reads(name: str, servers: Mapping[str, ServerPeer]) -> bool:
    if name in servers:
        return not servers[name].is_chat
    return not PeerName.parse(name).lookups
