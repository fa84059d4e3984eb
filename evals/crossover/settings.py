"""CrossoverSettings: what a measurement of many streams measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals.crossover.server_loop import ServerLoop
from specdec.evals.crossover.side import Setting, check_peers
from specdec.evals.crossover.summary import ADAPTIVE
from specdec.evals.crossover.workloads import MADE, kinds_of
from specdec.evals.data.sample import Sample, digest
from specdec.evals.latency.peer_setup import PeerSetup
from specdec.evals.latency.prompts import PROMPTS

SETTINGS = ("off", "fixed:4", "fixed:16", "adaptive")  # of ours alone
SETTINGS_VS = ("off", "adaptive")  # with peers


@dataclass(frozen=True)
class CrossoverSettings:
    """What to measure, every side at each concurrency with each kind of work.

    `kinds` are tasks of the samples, or of MADE, which are not asked of peers; none are all of
    them. Of samples of several turns, the first is asked.

    Raises UsageError for a kind that there is not, or for settings or concurrencies that make no
    sense.
    """

    config: EngineConfig
    concurrency: tuple[int, ...]
    settings: tuple[Setting, ...]
    peers: tuple[str, ...] = ()
    openvino_model: Path | None = None
    samples: tuple[Sample, ...] = PROMPTS
    kinds: tuple[str, ...] = ()
    temperature: float = 0.0
    max_tokens: int = 256
    rounds: int = 1

    def __post_init__(self) -> None:
        tasks = kinds_of(self.samples)
        if not self.kinds:
            object.__setattr__(self, "kinds", tasks if self.peers else (*tasks, *MADE))
        for kind in self.kinds:
            if kind not in (*tasks, *MADE):
                raise UsageError(f"unknown kind {kind!r}; choose from {', '.join((*tasks, *MADE))}")
            if kind in MADE and self.peers:
                raise UsageError(f"--kind {kind} is not asked of peers: leave out --vs")
        for name, values in (
            ("concurrency", self.concurrency),
            ("setting", tuple(setting.name for setting in self.settings)),
            ("kind", self.kinds),
        ):
            if not values or len(set(values)) < len(values):
                raise UsageError(f"name every {name} once")
        if min(self.concurrency) < 1:
            raise UsageError(f"concurrency must be at least 1, not {min(self.concurrency)}")
        if self.peers and ADAPTIVE not in [setting.name for setting in self.settings]:
            raise UsageError("peers are held against --setting adaptive: name it too")
        for setting in self.settings:
            setting.config(self.config)

    def check(self) -> dict[str, ServerLoop]:
        """Whatever else can be told before a model is loaded; gives the servers, which answered.

        Raises UsageError for a peer that is not to be had, or that cannot be asked these samples.
        """
        servers = check_peers(self.peers, self.peer_setup())
        for name, server in servers.items():
            for sample in self.samples:
                if server.is_chat and not sample.messages:
                    raise UsageError(
                        f"{name} is asked by messages, and sample {sample.sample_id!r} has none"
                    )
        return servers

    def peer_setup(self) -> PeerSetup:
        """What peers need to know."""
        return PeerSetup(self.config.model, 0, self.openvino_model, temperature=self.temperature)

    @staticmethod
    def num_requests(concurrency: int, num_tasks: int) -> int:
        """Requests of one run: as many for each stream, three or more; behind the first ones at
        least one of each task.
        """
        return concurrency * (1 + max(2, -(-num_tasks // concurrency)))

    def as_json(self) -> dict[str, Any]:
        """All of them, ready for JSON; of the samples a digest that tells them from others."""
        folder = self.openvino_model
        return {
            "config": asdict(self.config),
            "concurrency": list(self.concurrency),
            "settings": [setting.name for setting in self.settings],
            "peers": list(self.peers),
            "openvino_model": None if folder is None else str(folder),
            "samples": digest(self.samples),
            "kinds": list(self.kinds),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "rounds": self.rounds,
        }
