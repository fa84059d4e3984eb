"""Latency on this machine: steps against what its memory can give, and whole answers against peers.

Everything is measured in turn, round by round, so that all sides see the same machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specdec.evals.latency.answers import Answers
from specdec.evals.latency.basics import Basics, BasicsBench
from specdec.evals.latency.floor import Floor
from specdec.evals.latency.lineup import Lineup
from specdec.evals.latency.peak_memory import PeakMemory
from specdec.evals.latency.peers import best_of, packages
from specdec.evals.latency.server_peer import ServerPeer
from specdec.evals.latency.settings import LatencySettings
from specdec.evals.latency.summary import Measured, summarise
from specdec.evals.report.journal import Journal
from specdec.evals.report.machine import origin, target
from specdec.evals.report.progress import progress
from specdec.loading import LoadedModel, load_model
from specdec.native_model import NativeModel


def measure(
    settings: LatencySettings, servers: Mapping[str, ServerPeer], journal: Journal
) -> dict[str, Any]:
    """Warm up, measure all that the journal has not, prompt by prompt, sum up.

    servers: those that `settings.check` gave.
    """
    torch.manual_seed(0)
    memory = PeakMemory()
    memory.note("start")
    loaded = load_model(settings.config)
    num_questions = len(settings.samples) * len(settings.temperatures)
    with progress(num_questions + len(settings.sides) + len(settings.peers)) as advance:
        lineup = Lineup(settings, loaded, memory, servers, journal, advance)
    bench = None
    if not settings.answers_only:
        bench = BasicsBench(settings, loaded, lineup.readers)
        memory.note("what measures")
    if "memory" not in journal:
        journal.add("memory", memory.stages)
    memory.stages = journal["memory"]  # of who went on with the journal, it would be another
    numbers = range(1, settings.rounds + 1)
    keys = {number: f"round {number}, basics" for number in numbers}
    left = [number for number in numbers if bench and keys[number] not in journal]
    places = {number: lineup.places(number) for number in numbers}
    every = [place for of_round in places.values() for place in of_round]
    num_answers = sum(lineup.num_runs(place) for place in every if place.key not in journal)
    num_basics = bench.num_items * (len(left) + bool(left)) if bench else 0
    with progress(num_basics + num_answers) as advance:
        if bench and left:
            bench.basics(0, advance, repeats=1)  # compiles, fills caches and maps memory
        for number in numbers:
            if bench and number in left:
                found = bench.basics(number, advance, repeats=settings.repeats)
                journal.add(keys[number], found.as_json())
            for place in places[number]:
                if place.key not in journal:
                    journal.add(place.key, lineup.answers(place, advance).as_json())
    return {
        **origin(*packages(settings.peers)),
        **summarise(
            _measured(settings, loaded, lineup, memory),
            [Basics.from_json(journal[key]) for key in keys.values()] if bench else [],
            {place: Answers.from_json(journal[place.key]) for place in every},
        ),
    }


def _measured(
    settings: LatencySettings, loaded: LoadedModel, lineup: Lineup, memory: PeakMemory
) -> Measured:
    model, config = loaded.model, settings.config
    floor = Floor.of(model, config.kv, config.block_size)
    threads = model.num_threads if isinstance(model, NativeModel) else torch.get_num_threads()
    return Measured(
        target={
            **target(config, model),
            "threads": threads,
            "weight_bytes": floor.weight_bytes,
            "kv_bytes_per_token": floor.kv_bytes,
        },
        settings=settings,
        chosen=lineup.chosen,
        floor=floor,
        asked=lineup.asked,
        best_of=best_of(settings.peers),
        memory=memory,
        known_bytes=lineup.known_bytes,
        num_read=settings.num_read(loaded.max_model_len),
    )
