"""Difference: what else than the code is not the same in two runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Where reports say what they are from; lists and other objects are results.
_ORIGINS = ("machine", "target", "settings", "config")
_RESULTS = ("date", "command")
_OUTPUTS = ("--out", "--json", "--markdown")
_ABSENT = "-"
_LONGEST = 60


@dataclass(frozen=True)
class Difference:
    """A field of two reports that are not from the same; `-` where one has no such field."""

    field: str
    base: str
    value: str

    def __str__(self) -> str:
        return f"{self.field}: {self.base} -> {self.value}"


def differences(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Machine, versions, model, weights and settings that differ, in the base's order.

    Settings are those that the reports name; without any, the options of their commands.

    Example: `str(differences(monday, tuesday)[0]) == "machine.cores: 2 -> 4"`.
    """
    old, new = dict(_origin(base)), dict(_origin(other))
    return [
        Difference(field, _shown(old.get(field)), _shown(new.get(field)))
        for field in dict.fromkeys([*old, *new])
        if old.get(field) != new.get(field)
    ]


def _origin(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if name in _ORIGINS and isinstance(value, dict):
            yield from _leaves(value, name)
        elif isinstance(value, str | int) and name not in _RESULTS:
            yield name, value
    if not isinstance(data.get("settings"), dict):
        yield from _options(data["command"])


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield place, value
        return
    for name, inner in value.items():
        yield from _leaves(inner, f"{place}.{name}")


def _options(command: str) -> Iterator[tuple[str, str]]:
    """Each option once, with all its values; words that belong to none are one entry."""
    try:
        words = shlex.split(command)[3:]
    except ValueError:
        words = command.split()[3:]
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            found.setdefault(name, []).extend([value] if has_value else [])
        else:
            found.setdefault(name, []).append(word)
    for option, values in found.items():
        if option not in _OUTPUTS:
            yield option or "arguments", " ".join(values) or "given"


def _shown(value: Any) -> str:
    if value is None:
        return _ABSENT
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
