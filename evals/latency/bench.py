"""Latency on this machine: steps against what its memory can give, and whole answers against peers.

Everything is measured in turn, round by round, so that all sides see the same machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.evals.data.sample import Sample
from specdec.evals.latency.contender import Contender, Question, Run, checked, ours
from specdec.evals.latency.floor import Floor
from specdec.evals.latency.peak_memory import PeakMemory, known_bytes
from specdec.evals.latency.peers import PeerName, best_of, make_peers, packages
from specdec.evals.latency.read_bandwidth import ReadBandwidth
from specdec.evals.latency.round import Round
from specdec.evals.latency.server_peer import ServerPeer
from specdec.evals.latency.settings import LatencySettings
from specdec.evals.latency.side import PLAIN
from specdec.evals.latency.step_clock import StepClock, StepTime
from specdec.evals.latency.step_times import StepBench, fitting_contexts
from specdec.evals.latency.summary import Measured, summarise
from specdec.evals.report.journal import Journal
from specdec.evals.report.machine import origin, target
from specdec.evals.report.progress import Advance, progress
from specdec.generation import generate
from specdec.loading import LoadedModel, load_model
from specdec.params import SamplingParams

ROOM = 64  # of a peer's context behind the longest answer: some want a little more


def measure(
    settings: LatencySettings, servers: Mapping[str, ServerPeer], journal: Journal
) -> dict[str, Any]:
    """Warm up, measure every round that the journal has not, sum up.

    servers: those that `settings.check` gave.
    """
    torch.manual_seed(0)
    memory = PeakMemory()
    memory.note("start")
    loaded = load_model(settings.config)
    with progress(len(settings.samples) + len(settings.sides) + len(settings.peers)) as advance:
        bench = LatencyBench(settings, loaded, memory, servers, advance)
    numbers = range(1, settings.rounds + 1)
    left = [number for number in numbers if f"round {number}" not in journal]
    with progress((len(left) + bool(left)) * bench.num_items) as advance:
        if left:
            bench.round(0, advance, repeats=1)  # compiles, fills caches and maps memory
        for number in left:
            found = bench.round(number, advance, repeats=settings.repeats)
            journal.add(f"round {number}", found.as_json())
    memory.note("all")
    rounds = [Round.from_json(journal[f"round {number}"]) for number in numbers]
    return {
        **origin(*packages(settings.peers)),
        **summarise(bench.measured, rounds),
    }


@dataclass(frozen=True)
class Asked:
    """A sample's prompt, and as many tokens as its natural answer has.

    Everybody answers with as many: past its end token a model repeats itself, which drafters
    guess too well.
    """

    sample: Sample
    question: Question


class LatencyBench:
    """Engines and peers, ready to be measured in turn.

    They are made one after the other, each with an answer, so that it is seen how much memory
    each adds.
    """

    def __init__(
        self,
        settings: LatencySettings,
        loaded: LoadedModel,
        memory: PeakMemory,
        servers: Mapping[str, ServerPeer],
        advance: Advance,
    ) -> None:
        self._settings, self._loaded, self._memory = settings, loaded, memory
        config = replace(settings.config, control="fixed")
        self._clocks: dict[str, StepClock] = {}
        self._contenders: dict[str, Contender] = {}
        plain = Engine(PLAIN.config(config), loaded=loaded)
        self._known_bytes = known_bytes(plain)
        self._add(PLAIN.name, plain)
        self._asked = [self._ask(plain, sample, advance) for sample in settings.samples]
        memory.note(PLAIN.name)
        first = self._asked[0].question
        for side in settings.sides:
            advance(side.name)
            self._add(side.name, Engine(side.config(config), loaded=loaded))
            self._contenders[side.name](first)
            memory.note(side.name)
        self._floor = Floor.of(loaded.model, config.kv, config.block_size)
        self._bandwidth = ReadBandwidth(loaded.model, num_bytes=settings.buffer_bytes)
        self._contexts = fitting_contexts(
            settings.contexts, settings.rows, settings.repeats, loaded.max_model_len
        )
        self._steps = StepBench(
            loaded, replace(config, node_budget=max(settings.rows) - 1, prefix_cache=True)
        )
        memory.note("what measures")
        self._prefill_len = min(settings.prefill_len, loaded.max_model_len - 2)
        self._readers = [PLAIN.name]
        setup = settings.peer_setup(self._longest())
        for name, peers in make_peers(settings.peers, setup, servers):
            advance(name)
            for contender, peer in peers.items():
                self._contenders[contender] = checked(contender, peer)
                self._contenders[contender](first)
                if self._reads(name, servers):
                    self._readers.append(contender)
            memory.note(name)

    @staticmethod
    def _reads(name: str, servers: Mapping[str, ServerPeer]) -> bool:
        """Whether a peer is given the prompt that is only read: speculation has no part in it."""
        if name in servers:
            return not servers[name].is_chat
        return not PeerName.parse(name).lookups

    def _add(self, name: str, engine: Engine) -> None:
        self._clocks[name] = StepClock(engine)
        self._contenders[name] = checked(name, ours(engine))

    def _ask(self, engine: Engine, sample: Sample, advance: Advance) -> Asked:
        """Let the engine answer once, to see how long its answer is."""
        settings = self._settings
        advance(f"length of {sample.sample_id}")
        ids = tuple(sample.encode(engine.tokenizer))
        if not 0 < len(ids) < engine.max_model_len:
            raise UsageError(
                f"sample {sample.sample_id!r} has {len(ids)} tokens; "
                f"the context holds {engine.max_model_len}, one of them for the answer"
            )
        params = SamplingParams(
            max_tokens=settings.max_tokens, temperature=settings.temperature, seed=0
        )
        num_tokens = max(1, len(generate(engine, ids, params).tokens))
        question = Question(ids, num_tokens, settings.temperature, 0, sample.messages)
        return Asked(sample, question)

    def _longest(self) -> int:
        """The longest context that contenders will see."""
        questions = [asked.question for asked in self._asked]
        answers = [len(question.prompt_ids) + question.num_tokens for question in questions]
        longest = max(self._prefill_len + 1, *answers) + ROOM
        return min(longest, self._loaded.max_model_len)

    @property
    def num_items(self) -> int:
        """Calls of `advance` per round."""
        num_answers = len(self._asked) * len(self._contenders)
        return 2 + len(self._contexts) + num_answers + len(self._readers)

    @property
    def measured(self) -> Measured:
        """What the rounds are of."""
        settings, model = self._settings, self._loaded.model
        return Measured(
            target={
                **target(settings.config, model),
                "threads": self._bandwidth.num_threads,
                "weight_bytes": self._floor.weight_bytes,
                "kv_bytes_per_token": self._floor.kv_bytes,
            },
            settings=settings,
            floor=self._floor,
            samples={asked.sample.sample_id: asked.sample.task for asked in self._asked},
            prefill_len=self._prefill_len,
            best_of=best_of(settings.peers),
            memory=self._memory,
            known_bytes=self._known_bytes,
        )

    def round(self, index: int, advance: Advance, *, repeats: int) -> Round:
        """Everything once; round 0 warms up."""
        settings, where = self._settings, f"round {index}, "
        advance(f"{where}bandwidth")
        bandwidth = self._bandwidth.measure()
        steps: dict[tuple[int, int], list[StepTime]] = {}
        for context in self._contexts:
            advance(f"{where}steps at {context} tokens")
            by_rows = self._steps.steps(context, settings.rows, repeats)
            steps |= {(context, rows): times for rows, times in by_rows.items()}
        advance(f"{where}{settings.num_streams} streams")
        one_stream = self._steps.tokens_per_second(1, settings.stream_steps)
        many_streams = self._steps.tokens_per_second(settings.num_streams, settings.stream_steps)
        for clock in self._clocks.values():
            clock.steps.clear()
        answers: dict[str, dict[str, Run]] = {}
        for asked in self._asked:
            sample = asked.sample.sample_id
            answers[sample] = {}
            for name, contender in self._contenders.items():
                advance(f"{where}{sample}: {name}")
                answers[sample][name] = contender(asked.question)
        decode_steps = {
            name: [step for step in clock.steps if step.is_decode]
            for name, clock in self._clocks.items()
        }
        draw = random.Random(index).randrange
        vocab_size = self._loaded.model.config.vocab_size
        unseen = Question(tuple(draw(vocab_size) for _ in range(self._prefill_len)), 1)
        prefills = {}
        for name in self._readers:
            advance(f"{where}{self._prefill_len} tokens of prompt: {name}")
            prefills[name] = self._contenders[name](unseen)
        return Round(bandwidth, steps, one_stream, many_streams, answers, prefills, decode_steps)
