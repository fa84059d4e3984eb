"""LatencySettings: what a latency measurement measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals.data.sample import Sample, digest
from specdec.evals.latency.peer_setup import PeerSetup
from specdec.evals.latency.peers import check_peers
from specdec.evals.latency.prompts import PROMPTS
from specdec.evals.latency.read_bandwidth import BUFFER_BYTES
from specdec.evals.latency.server_peer import ServerPeer
from specdec.evals.latency.side import PLAIN, STANDARD, Side

PREFILL_LEN = 2000


@dataclass(frozen=True)
class LatencySettings:
    """What to measure. `max_tokens` bounds the answers; a prompt of `prefill_len` is only read.

    `sides` are our contenders beside plain decoding; others are held against the first. Of samples
    of several turns, the first is asked. With `answers_only`, steps by size, streams, and the
    prompt that is only read are left out.
    """

    config: EngineConfig
    sides: tuple[Side, ...] = STANDARD
    peers: tuple[str, ...] = ()
    openvino_model: Path | None = None
    gguf: Path | None = None
    samples: tuple[Sample, ...] = PROMPTS
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 256
    rounds: int = 3
    answers_only: bool = False
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (200, 1000, 2000, 6000)
    repeats: int = 4  # steps per round, number of rows and context
    num_streams: int = 8
    stream_steps: int = 16
    prefill_len: int = PREFILL_LEN
    buffer_bytes: int = BUFFER_BYTES

    def quick(self) -> LatencySettings:
        """Few sizes and repeats."""
        return replace(self, rows=(1, 4, 16), contexts=(200, 2000), repeats=2)

    def check(self) -> dict[str, ServerPeer]:
        """Whatever can be told before a model is loaded; gives the servers, which answered.

        Raises UsageError for a peer that is not to be had, or that cannot be asked these samples.
        """
        names = [side.name for side in (PLAIN, *self.sides)]
        temperatures = [f"{temperature:g}" for temperature in self.temperatures]
        for kind, given in (
            ("--drafter", names),
            ("--vs", self.peers),
            ("--temperature", temperatures),
        ):
            for name in given:
                if list(given).count(name) > 1:
                    raise UsageError(f"{kind}: {name} is named twice")
        servers = check_peers(self.peers, self.peer_setup(0))
        for sample in self.samples:
            chat = [name for name, server in servers.items() if server.is_chat]
            if chat and not sample.messages:
                raise UsageError(
                    f"{chat[0]} is asked by messages, and sample {sample.sample_id!r} has none"
                )
        return servers

    def num_read(self, max_model_len: int) -> int:
        """Tokens of the prompt that is only read, as far as the model's context holds them."""
        return 0 if self.answers_only else min(self.prefill_len, max_model_len - 2)

    def peer_setup(self, max_len: int) -> PeerSetup:
        """What peers need to know; `max_len` is the longest context that they will see."""
        return PeerSetup(self.config.model, max_len, self.openvino_model, self.gguf)

    def as_json(self) -> dict[str, Any]:
        """All of them, ready for JSON; of the samples a digest that tells them from others."""
        names = ("openvino_model", "gguf")
        files = {name: str(value) for name in names if (value := getattr(self, name)) is not None}
        return {**asdict(replace(self, samples=())), **dict.fromkeys(names), **files} | {
            "samples": digest(self.samples)
        }
