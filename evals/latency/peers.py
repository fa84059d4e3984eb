"""Peers: other libraries and servers that answer the same prompts on the same machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from specdec.errors import UsageError
from specdec.evals.latency import llama_peer, openvino_peer, transformers_peer
from specdec.evals.latency.contender import Contender
from specdec.evals.latency.peer_setup import PeerSetup
from specdec.evals.latency.server_peer import ServerPeer, is_server, label


class Peer(Protocol):
    """A library with our model."""

    def contender(self, lookup: int | None) -> Contender:
        """Plain, or with its own speculation, guessing `lookup` tokens at a time."""


@dataclass(frozen=True)
class PeerKind:
    """How a library is found and loaded; `with_model` names one in a format of its own."""

    package: str
    check: Callable[[PeerSetup], None]
    load: Callable[[PeerSetup], Peer]
    lookups: tuple[int, ...]  # settings of its own speculation that are tried
    with_model: Callable[[PeerSetup, Path], PeerSetup] | None = None


PEERS: dict[str, PeerKind] = {
    "transformers": PeerKind(
        "transformers", transformers_peer.check, transformers_peer.load, transformers_peer.LOOKUPS
    ),
    "openvino": PeerKind(
        "openvino-genai",
        openvino_peer.check,
        openvino_peer.load,
        openvino_peer.LOOKUPS,
        lambda setup, model: replace(setup, openvino_model=model),
    ),
    "llama.cpp": PeerKind(
        "llama-cpp-python",
        llama_peer.check,
        llama_peer.load,
        llama_peer.LOOKUPS,
        lambda setup, model: replace(setup, gguf=model),
    ),
}
_LOOKUP = "lookup"


@dataclass(frozen=True)
class PeerName:
    """What --vs names: an address, or a library, plain or with its own speculation.

    `lookups` are the settings of the speculation that are to be tried, `model` one that is not the
    setup's.

    Example: `PeerName.parse("openvino:lookup=5@exported").lookups == (5,)`.
    """

    text: str
    library: str = ""
    lookups: tuple[int, ...] = ()
    model: Path | None = None

    @classmethod
    def parse(cls, text: str) -> PeerName:
        """Raises UsageError, naming what there is."""
        if is_server(text):
            return cls(text)
        name, has_model, model = text.partition("@")
        library, has_setting, setting = name.partition(":")
        if library not in PEERS:
            raise UsageError(
                f"unknown peer {library!r}; choose from {', '.join(PEERS)}, or give a server's URL"
            )
        kind = PEERS[library]
        if has_model and (kind.with_model is None or not model):
            raise UsageError(
                f"--vs {text}: a model of its own is openvino@FOLDER or llama.cpp@FILE"
            )
        path = Path(model) if has_model else None
        if not has_setting:
            return cls(text, library, model=path)
        word, has_number, number = setting.partition("=")
        if word == _LOOKUP and not has_number:
            return cls(text, library, kind.lookups, path)
        if word == _LOOKUP and number.isdecimal() and int(number) > 0:
            return cls(text, library, (int(number),), path)
        raise UsageError(
            f"--vs {text}: {library}'s own speculation is {library}:{_LOOKUP}, "
            f"or {library}:{_LOOKUP}=N for N tokens at a time"
        )

    @property
    def label(self) -> str:
        """What reports call it: of a server its label, of a model's path the last part."""
        if not self.library:
            return label(self.text)
        return self.text.partition("@")[0] + self._at_model

    @property
    def contenders(self) -> tuple[str, ...]:
        """Names of the contenders that it stands for."""
        if not self.lookups:
            return (self.label,)
        return tuple(f"{self.library}:{_LOOKUP}={n}{self._at_model}" for n in self.lookups)

    @property
    def _at_model(self) -> str:
        return "" if self.model is None else f"@{self.model.name}"

    def setup(self, setup: PeerSetup) -> PeerSetup:
        """With its own model, if it names one."""
        with_model = PEERS[self.library].with_model
        if self.model is None or with_model is None:
            return setup
        return with_model(setup, self.model)

    def check(self, setup: PeerSetup) -> None:
        """Raise UsageError if a library's package or model is missing."""
        if self.library:
            PEERS[self.library].check(self.setup(setup))


def parse_names(names: Sequence[str]) -> list[PeerName]:
    """All that --vs names. Raises UsageError for a name that is unknown or twice there."""
    parsed = list(map(PeerName.parse, names))
    contenders = [contender for name in parsed for contender in name.contenders]
    for contender in contenders:
        if contenders.count(contender) > 1:
            raise UsageError(f"--vs: {contender} is named twice")
    return parsed


def check_peers(names: Sequence[str], setup: PeerSetup) -> dict[str, ServerPeer]:
    """Raise, before anything is loaded, whatever is missing; gives the servers, which answered.

    Raises UsageError for a name that is unknown or twice there, a package or model that is missing,
    a server that does not answer.
    """
    parsed = parse_names(names)
    for name in parsed:
        name.check(setup)
    return {name.text: ServerPeer(name.text) for name in parsed if not name.library}


def make_peers(
    names: Sequence[str], setup: PeerSetup, servers: Mapping[str, ServerPeer]
) -> Iterator[tuple[str, dict[str, Contender]]]:
    """Load the peers of these names, which `check_peers` has let through, as they are asked for.

    Gives each name with the contenders that it stands for. A library loads a model once.
    """
    loaded: dict[tuple[str, Path | None], Peer] = {}
    for name in map(PeerName.parse, names):
        if not name.library:
            yield name.text, dict.fromkeys(name.contenders, servers[name.text])
            continue
        key = name.library, name.model
        if key not in loaded:
            loaded[key] = PEERS[name.library].load(name.setup(setup))
        settings = zip(name.contenders, name.lookups or (None,), strict=True)
        yield (
            name.text,
            {contender: loaded[key].contender(lookup) for contender, lookup in settings},
        )


def best_of(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The names that stand for several settings, of which each prompt has a best one."""
    parsed = map(PeerName.parse, names)
    return {name.label: name.contenders for name in parsed if len(name.lookups) > 1}


def packages(names: Sequence[str]) -> list[str]:
    """Whose versions matter."""
    libraries = dict.fromkeys(PeerName.parse(name).library for name in names)
    return [PEERS[library].package for library in libraries if library]
