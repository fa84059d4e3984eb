"""Latency on this machine: steps against what its memory can give, and whole answers against peers.

Everything is measured in turn, round by round, so that all sides see the same machine.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.evals.latency.contender import Contender, Run, checked, num_equal, ours
from specdec.evals.latency.floor import Floor
from specdec.evals.latency.peers import PeerSetup, check_peers, make_peers
from specdec.evals.latency.prompts import PROMPTS
from specdec.evals.latency.read_bandwidth import BUFFER_BYTES, PASSES, Bandwidth, ReadBandwidth
from specdec.evals.latency.step_clock import StepClock, StepTime, breakdown
from specdec.evals.latency.step_times import StepBench, StepCell, fitting_contexts
from specdec.evals.report.machine import origin, target
from specdec.evals.report.progress import Advance, progress
from specdec.evals.report.spread import ratio_of_rounds
from specdec.generation import generate
from specdec.loading import LoadedModel, load_model
from specdec.params import SamplingParams

BASELINE, DRAFTED = "specdec, no drafts", "specdec, ngram"


@dataclass(frozen=True)
class LatencySettings:
    """What to measure. `max_tokens` bounds the answers; a prompt of `prefill_len` is only read."""

    config: EngineConfig
    peers: tuple[str, ...] = ()
    openvino_model: Path | None = None
    gguf: Path | None = None
    max_tokens: int = 128
    rounds: int = 5
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (200, 1000, 2000, 6000)
    repeats: int = 4  # steps per round, number of rows and context
    num_streams: int = 8
    stream_steps: int = 16
    prefill_len: int = 2000
    buffer_bytes: int = BUFFER_BYTES

    def quick(self) -> LatencySettings:
        """Few sizes and repeats."""
        return replace(self, rows=(1, 4, 16), contexts=(200, 2000), repeats=2)


@dataclass(frozen=True)
class Round:
    """What one round measured. Streams in tokens per second."""

    bandwidth: Bandwidth
    steps: Mapping[tuple[int, int], Sequence[StepTime]]  # by context and rows
    one_stream: float
    many_streams: float
    answers: Mapping[str, Mapping[str, Run]]  # by prompt and contender
    prefills: Mapping[str, Run]


def measure(settings: LatencySettings) -> dict[str, Any]:
    """Warm up, measure every round, sum up.

    Raises UsageError for a peer that is not to be had, before anything is measured.
    """
    peer_setup = PeerSetup(
        settings.config.model,
        settings.prefill_len + settings.max_tokens + 1024,
        settings.openvino_model,
        settings.gguf,
    )
    check_peers(settings.peers, peer_setup)
    torch.manual_seed(0)
    loaded = load_model(settings.config)
    bench = LatencyBench(settings, loaded, make_peers(settings.peers, peer_setup))
    with progress((settings.rounds + 1) * bench.num_items) as advance:
        bench.round(0, advance, repeats=1)  # compiles, fills caches and maps memory
        bench.forget()
        rounds = [
            bench.round(index, advance, repeats=settings.repeats)
            for index in range(1, settings.rounds + 1)
        ]
    return bench.report(rounds)


class LatencyBench:
    """Engines and peers, ready to be measured in turn."""

    def __init__(
        self, settings: LatencySettings, loaded: LoadedModel, peers: Mapping[str, Contender]
    ) -> None:
        self._settings, self._loaded = settings, loaded
        config = replace(settings.config, control="fixed")
        self._floor = Floor.of(loaded.model, config.kv, config.block_size)
        self._bandwidth = ReadBandwidth(loaded.model, num_bytes=settings.buffer_bytes)
        self._contexts = fitting_contexts(
            settings.contexts, settings.rows, settings.repeats, loaded.max_model_len
        )
        self._steps = StepBench(
            loaded, replace(config, node_budget=max(settings.rows) - 1, prefix_cache=True)
        )
        # A prefix hit would make later rounds cheaper than the first.
        engines = {
            name: Engine(replace(config, drafter=drafter, prefix_cache=False), loaded=loaded)
            for name, drafter in ((BASELINE, "none"), (DRAFTED, "ngram"))
        }
        self._clocks = {name: StepClock(engine) for name, engine in engines.items()}
        self._peers = {name: checked(name, peer) for name, peer in peers.items()}
        own = {name: checked(name, ours(engine)) for name, engine in engines.items()}
        self._contenders: dict[str, Contender] = {**own, **self._peers}
        self._prompts = self._encode(engines[BASELINE])
        self._prefill_len = min(settings.prefill_len, loaded.max_model_len - 2)

    def _encode(self, engine: Engine) -> dict[str, tuple[list[int], int]]:
        """Each prompt's token ids, and the number of tokens of its natural answer.

        Everybody answers with as many: past its end token a model repeats itself, which drafters
        guess too well.
        """
        params = SamplingParams(max_tokens=self._settings.max_tokens)
        found = {}
        for name, text in PROMPTS.items():
            ids = engine.tokenizer.encode_chat([{"role": "user", "content": text}])
            found[name] = ids, len(generate(engine, ids, params).tokens)
        return found

    @property
    def num_items(self) -> int:
        """Calls of `advance` per round."""
        num_prefills = 1 + len(self._peers)
        return 2 + len(self._contexts) + len(PROMPTS) * len(self._contenders) + num_prefills

    def forget(self) -> None:
        """Leave the steps so far out of the breakdown."""
        for clock in self._clocks.values():
            clock.steps.clear()

    def round(self, index: int, advance: Advance, *, repeats: int) -> Round:
        """Everything once; round 0 warms up."""
        settings, where = self._settings, f"round {index}, "
        advance(f"{where}bandwidth")
        bandwidth = self._bandwidth.measure()
        steps: dict[tuple[int, int], Sequence[StepTime]] = {}
        for context in self._contexts:
            advance(f"{where}steps at {context} tokens")
            by_rows = self._steps.steps(context, settings.rows, repeats)
            steps |= {(context, rows): times for rows, times in by_rows.items()}
        advance(f"{where}{settings.num_streams} streams")
        one_stream = self._steps.tokens_per_second(1, settings.stream_steps)
        many_streams = self._steps.tokens_per_second(settings.num_streams, settings.stream_steps)
        answers: dict[str, dict[str, Run]] = {}
        for prompt, (ids, num_tokens) in self._prompts.items():
            answers[prompt] = {}
            for name, contender in self._contenders.items():
                advance(f"{where}{prompt}: {name}")
                answers[prompt][name] = contender(ids, num_tokens)
        draw = random.Random(index).randrange
        unseen = [draw(self._loaded.model.config.vocab_size) for _ in range(self._prefill_len)]
        prefills = {}
        for name in (BASELINE, *self._peers):
            advance(f"{where}{self._prefill_len} tokens of prompt: {name}")
            prefills[name] = self._contenders[name](unseen, 1)
        return Round(bandwidth, steps, one_stream, many_streams, answers, prefills)

    def report(self, rounds: Sequence[Round]) -> dict[str, Any]:
        """All rounds summed up, ready for JSON."""
        settings, floor = self._settings, self._floor
        config, model = settings.config, self._loaded.model
        bandwidths = [item.bandwidth for item in rounds]
        cells = [
            StepCell(*size, [item.steps[size] for item in rounds]).summary(floor, bandwidths)
            for size in rounds[0].steps
        ]
        return {
            **origin(),
            "target": {
                **target(config, model),
                "threads": self._bandwidth.num_threads,
                "weight_bytes": floor.weight_bytes,
                "kv_bytes_per_token": floor.kv_bytes,
            },
            "settings": {
                "peers": list(settings.peers),
                "node_budget": config.node_budget,
                "max_tokens": settings.max_tokens,
                "rounds": len(rounds),
            },
            "bandwidth": {
                "bytes": settings.buffer_bytes,
                "passes": PASSES,
                "best": statistics.median(item.best for item in bandwidths),
                "median": statistics.median(item.median for item in bandwidths),
                "rounds": [asdict(item) for item in bandwidths],
            },
            "steps": cells,
            "breakdown": {
                name: breakdown([step for step in clock.steps if step.is_decode])
                for name, clock in self._clocks.items()
            },
            "streams": stream_summary(settings.num_streams, rounds),
            "prefill": prefill_summary(self._prefill_len, [item.prefills for item in rounds]),
            "prompts": {
                prompt: answer_summary([item.answers[prompt] for item in rounds])
                for prompt in self._prompts
            },
        }


def stream_summary(num_streams: int, rounds: Sequence[Round]) -> dict[str, Any]:
    """Tokens per second of one stream and of many together, and their ratio round by round."""
    one, many = [r.one_stream for r in rounds], [r.many_streams for r in rounds]
    return {
        "num_streams": num_streams,
        "one": round(statistics.median(one), 1),
        "many": round(statistics.median(many), 1),
        "ratio": round(ratio_of_rounds(many, one), 2),
    }


def prefill_summary(num_tokens: int, rounds: Sequence[Mapping[str, Run]]) -> dict[str, Any]:
    """Seconds to the first token after a prompt nobody has seen; ratios are speeds, ours first."""
    seconds = {name: [item[name].total_s for item in rounds] for name in rounds[0]}
    return {
        "num_tokens": num_tokens,
        "seconds": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "ratios": {
            f"{BASELINE} / {name}": round(ratio_of_rounds(values, seconds[BASELINE]), 2)
            for name, values in seconds.items()
            if name != BASELINE
        },
    }


def answer_summary(rounds: Sequence[Mapping[str, Run]]) -> dict[str, Any]:
    """Medians, spreads and ratios of one prompt's answers.

    A ratio is the median over rounds of that round's ratio of speeds. `num_equal` counts tokens
    before an answer parts from ours without drafts.
    """
    speeds = {name: [item[name].tokens_per_second for item in rounds] for name in rounds[0]}
    first = rounds[0]
    pairs = [(DRAFTED, BASELINE)]
    for peer in first:
        if peer not in (BASELINE, DRAFTED):
            pairs += [(BASELINE, peer), (DRAFTED, peer)]
    return {
        "num_tokens": len(first[BASELINE].token_ids),
        "contenders": {
            name: {
                "tokens_per_second": round(statistics.median(values), 1),
                "min": round(min(values), 1),
                "max": round(max(values), 1),
                "tokens_per_step": round(first[name].tokens_per_step, 2),
                "num_equal": num_equal(first[name].token_ids, first[BASELINE].token_ids),
                "seconds": [round(item[name].total_s, 5) for item in rounds],
            }
            for name, values in speeds.items()
        },
        "ratios": {
            f"{side} / {other}": round(ratio_of_rounds(speeds[side], speeds[other]), 2)
            for side, other in pairs
        },
    }
