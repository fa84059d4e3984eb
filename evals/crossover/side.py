"""Side: what is measured in turn, a setting of ours or a peer with many streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from specdec.config import Control, EngineConfig
from specdec.errors import UsageError
from specdec.evals.crossover.loop_run import LoopRun
from specdec.evals.crossover.openvino_loop import OpenVinoLoop, OpenVinoPipeline
from specdec.evals.crossover.server_loop import ServerLoop
from specdec.evals.crossover.summary import ADAPTIVE, OFF
from specdec.evals.crossover.workloads import Task
from specdec.evals.latency.peer_setup import PeerSetup
from specdec.evals.latency.peers import PeerName, parse_names


class Loop(Protocol):
    """Keeps so many streams going and says how fast they were."""

    def run(self, tasks: Sequence[Task], concurrency: int, num_requests: int) -> LoopRun:
        """One closed loop."""


@dataclass(frozen=True)
class Setting:
    """How our draft nodes are budgeted: off, fixed:N or adaptive.

    Off is plain decoding without a drafter, adaptive what an engine does by itself.
    """

    name: str
    control: Control
    node_budget: int | None = None  # None: the configuration's

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Example: `Setting.parse("fixed:4")`. Raises UsageError for anything else."""
        if text == OFF:
            return cls(OFF, "fixed", 0)
        if text == ADAPTIVE:
            return cls(ADAPTIVE, "adaptive")
        kind, _, number = text.partition(":")
        if kind != "fixed" or not number.isdecimal() or int(number) == 0:
            raise UsageError(f"unknown setting {text!r}; use off, fixed:N (N from 1) or adaptive")
        return cls(f"fixed:{int(number)}", "fixed", int(number))

    def config(self, config: EngineConfig) -> EngineConfig:
        """The configuration with this setting. Raises UsageError for too many nodes."""
        budget = config.node_budget if self.node_budget is None else self.node_budget
        drafter = "none" if self.name == OFF else config.drafter
        return replace(config, control=self.control, node_budget=budget, drafter=drafter)


def check_peers(names: Sequence[str], setup: PeerSetup) -> dict[str, ServerLoop]:
    """Raise, before anything is loaded, whatever is missing; gives the servers by their labels.

    Raises UsageError for a name that is unknown or named twice, a library that does not batch or is
    missing, its model, or a server that does not answer.
    """
    parsed = parse_names(names)
    for name in parsed:
        if name.library not in ("", "openvino"):
            raise UsageError(
                f"--vs {name.text} is not measured with many streams; give openvino, "
                "openvino:lookup, or the URL of a server"
            )
        name.check(setup)
    return {name.label: ServerLoop(name.text) for name in parsed if not name.library}


def peer_loops(
    names: Sequence[str], setup: PeerSetup, servers: Mapping[str, ServerLoop]
) -> dict[str, Loop]:
    """The peers that `check_peers` has let through, by the names of their contenders."""
    loops: dict[str, Loop] = {}
    pipelines: dict[tuple[Path, bool], OpenVinoPipeline] = {}
    for name in map(PeerName.parse, names):
        if not name.library:
            loops[name.label] = servers[name.label]
            continue
        folder = name.setup(setup).openvino_model
        assert folder is not None, "checked"
        with_lookup = bool(name.lookups)
        key = folder, with_lookup
        if key not in pipelines:
            pipelines[key] = OpenVinoPipeline(folder, with_lookup=with_lookup)
        for contender, lookup in zip(name.contenders, name.lookups or (None,), strict=True):
            loops[contender] = OpenVinoLoop(pipelines[key], lookup)
    return loops
