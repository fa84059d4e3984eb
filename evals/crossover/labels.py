"""Labels: what sides are called in tables and plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from specdec.evals.crossover.summary import ADAPTIVE, OFF
from specdec.evals.latency.server_peer import is_server

OURS = "specdec"


def labels(data: Mapping[str, Any]) -> dict[str, str]:
    """By side, ours first. Beside peers ours have the product's name; a server has its label, or
    else is called as it calls itself.

    data: of `measure`. Example: `labels(data)["off"]` is "specdec, no drafts" beside peers.
    """
    settings = data["settings"]
    names = {name: name for name in settings["settings"]}
    if not settings["peers"]:
        return names
    own = {OFF: f"{OURS}, no drafts", ADAPTIVE: OURS}
    names = {name: own.get(name, f"{OURS}, {name}") for name in names}
    servers = settings["servers"]
    counts = Counter(servers.values())
    for name in settings["peers"]:
        owner = servers.get(name, "")
        is_told_by_it = is_server(name) and owner and counts[owner] == 1
        names[name] = f"{owner}, server" if is_told_by_it else name
    return names
