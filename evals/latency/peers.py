"""Peers: other libraries and servers that answer the same prompts on the same machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.errors import UsageError
from specdec.evals.latency import llama_peer, openvino_peer, transformers_peer, vllm_peer
from specdec.evals.latency.contender import Contender
from specdec.evals.latency.peer_setup import PeerSetup
from specdec.evals.latency.server_peer import ServerPeer, is_server


class Peer(Protocol):
    """A library with our model."""

    def contender(self, lookup: int | None) -> Contender:
        """Plain, or with its own speculation, guessing `lookup` tokens at a time."""


def _takes_all(setup: PeerSetup) -> None:
    """Its own speculation does whatever plain answers do."""


@dataclass(frozen=True)
class PeerKind:
    """How a library is found and loaded, and what its own speculation is called."""

    package: str
    check: Callable[[PeerSetup], None]
    load: Callable[[PeerSetup], Peer]
    lookups: tuple[int, ...]  # settings of it that are tried
    speculation: str = "lookup"
    check_speculation: Callable[[PeerSetup], None] = _takes_all


PEERS: dict[str, PeerKind] = {
    "transformers": PeerKind(
        "transformers", transformers_peer.check, transformers_peer.load, transformers_peer.LOOKUPS
    ),
    "openvino": PeerKind(
        "openvino-genai",
        openvino_peer.check,
        openvino_peer.load,
        openvino_peer.LOOKUPS,
        check_speculation=openvino_peer.check_lookup,
    ),
    "llama.cpp": PeerKind(
        "llama-cpp-python", llama_peer.check, llama_peer.load, llama_peer.LOOKUPS
    ),
    "vllm": PeerKind("vllm", vllm_peer.check, vllm_peer.load, vllm_peer.LOOKUPS, "ngram"),
}


@dataclass(frozen=True)
class PeerName:
    """What --vs names: an address, or a library, plain or with its own speculation.

    `lookups` are the settings of the speculation that are to be tried.

    Example: `PeerName.parse("openvino:lookup=5").lookups == (5,)`.
    """

    text: str
    library: str = ""
    lookups: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> PeerName:
        """Raises UsageError, naming what there is."""
        if is_server(text):
            return cls(text)
        library, has_setting, setting = text.partition(":")
        if library not in PEERS:
            raise UsageError(
                f"unknown peer {library!r}; choose from {', '.join(PEERS)}, or give a server's URL"
            )
        if not has_setting:
            return cls(text, library)
        kind = PEERS[library]
        word, has_number, number = setting.partition("=")
        if word == kind.speculation and not has_number:
            return cls(text, library, kind.lookups)
        if word == kind.speculation and number.isdecimal() and int(number) > 0:
            return cls(text, library, (int(number),))
        raise UsageError(
            f"--vs {text}: {library}'s own speculation is {library}:{kind.speculation}, "
            f"or {library}:{kind.speculation}=N for N tokens at a time"
        )

    @property
    def contenders(self) -> tuple[str, ...]:
        """Names of the contenders that it stands for."""
        if not self.lookups:
            return (self.text,)
        word = PEERS[self.library].speculation
        return tuple(f"{self.library}:{word}={lookup}" for lookup in self.lookups)


def check_peers(names: Sequence[str], setup: PeerSetup) -> dict[str, ServerPeer]:
    """Raise, before anything is loaded, whatever is missing; gives the servers, which answered.

    Raises UsageError for an unknown name, a package or model that is missing, a server that does
    not answer.
    """
    parsed = list(map(PeerName.parse, names))
    for name in parsed:
        if name.library:
            PEERS[name.library].check(setup)
        if name.lookups:
            PEERS[name.library].check_speculation(setup)
    return {name.text: ServerPeer(name.text) for name in parsed if not name.library}


def make_peers(
    names: Sequence[str], setup: PeerSetup, servers: Mapping[str, ServerPeer]
) -> Iterator[tuple[str, dict[str, Contender]]]:
    """Load the peers of these names, which `check_peers` has let through, as they are asked for.

    Gives each name with the contenders that it stands for. A library is loaded once.
    """
    loaded: dict[str, Peer] = {}
    for name in map(PeerName.parse, names):
        if not name.library:
            yield name.text, {name.text: servers[name.text]}
            continue
        if name.library not in loaded:
            loaded[name.library] = PEERS[name.library].load(setup)
        settings = zip(name.contenders, name.lookups or (None,), strict=True)
        peer = loaded[name.library]
        yield name.text, {contender: peer.contender(lookup) for contender, lookup in settings}


def best_of(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The names that stand for several settings, of which each prompt has a best one."""
    parsed = map(PeerName.parse, names)
    return {name.text: name.contenders for name in parsed if len(name.lookups) > 1}


def packages(names: Sequence[str]) -> list[str]:
    """Whose versions matter."""
    libraries = dict.fromkeys(PeerName.parse(name).library for name in names)
    return [PEERS[library].package for library in libraries if library]
