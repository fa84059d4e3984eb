"""Sweep: one setting that is changed at a time, of the requests or of a server of our own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from specdec.config import EngineConfig
from specdec.errors import UsageError

# Settings with which a server of our own can be started.
SERVER_KEYS = (
    *("weights", "kv", "backend", "drafter", "control"),
    *("node_budget", "max_running", "kv_memory_mib", "threads"),
)
_OFF = {
    "drafter": "none",
    "drafters": "none",
    "node_budget": 0,
    "speculation.enabled": False,
    "speculation.max_nodes": 0,
}


@dataclass(frozen=True)
class Series:
    """What is measured at every level: fields of the requests, and the server's own settings.

    `label` is KEY=VALUE of a sweep, or empty. `config` is None for a server that runs already.
    `is_off` says that nothing is drafted.
    """

    label: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    config: EngineConfig | None = None
    is_off: bool = False

    @property
    def file_part(self) -> str:
        """The label as a part of a file's name, empty without one; two labels never share it."""
        return quote(self.label, safe="=+")


def parse_sweep(text: str | None, config: EngineConfig | None) -> tuple[Series, ...]:
    """One series per value of `key=a,b,c`; `config` is that of a server of our own.

    A value may be JSON; `+` stands for the comma of several drafters. A key with a dot is a field
    of an object of the request, `drafters` is short for speculation.drafters, and its value `none`
    turns speculation off. Raises UsageError for what is not of this form.

    Example: `parse_sweep("node_budget=0,8,16", EngineConfig())`.
    """
    if text is None:
        return (Series(config=config),)
    key, found, values = text.partition("=")
    key, names = key.strip(), [value.strip() for value in values.split(",")]
    if not found or not key or not all(names) or len(set(names)) < len(names):
        raise UsageError(f"--sweep takes key=a,b,c with different values, not {text!r}")
    return tuple(_series(key, name, config) for name in names)


def _series(key: str, name: str, config: EngineConfig | None) -> Series:
    label = f"{key}={name}"
    value = _value(name)
    is_off = key in _OFF and value == _OFF[key]
    if key in SERVER_KEYS:
        if config is None:
            raise UsageError(
                f"{key} is a setting of the server: without --url one is started for each value"
            )
        value = value.replace("+", ",") if isinstance(value, str) else value
        try:
            changed: dict[str, Any] = {key: value}
            swept = dataclasses.replace(config, **changed)
        except TypeError:
            raise UsageError(f"--sweep {label}: {key} does not take that value") from None
        return Series(label, {}, swept, is_off)
    if key in ("stream", "stream_options"):
        raise UsageError(f"--sweep {key}: answers are always streamed, for the times of tokens")
    if key == "drafters":
        names = {"enabled": False} if is_off else {"drafters": name.split("+")}
        return Series(label, {"speculation": names}, config, is_off)
    *parents, last = key.split(".")
    fields: dict[str, Any] = {last: value}
    for parent in reversed(parents):
        fields = {parent: fields}
    return Series(label, fields, config, is_off)


def _value(name: str) -> Any:
    try:
        return json.loads(name)
    except ValueError:
        return name
