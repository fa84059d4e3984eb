"""Roster: the clients that the tests run, where they are installed, and what each cannot do."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
MAKE = "run `make clients`"


@dataclass(frozen=True)
class Mode:
    """One way of asking: `lacks` has, for each case that cannot be asked so, the reason.

    `hides` has, for each part of an answer that it does not show, the cases it is missing in.
    """

    name: str
    streams: bool = False
    hides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Client:
    """A client library with an environment of its own, named like its folder here."""

    name: str
    modes: tuple[Mode, ...]

    @property
    def is_python(self) -> bool:
        return (HERE / self.name / "driver.py").exists()

    @property
    def environment(self) -> Path:
        """Its folder below $SPECDEC_CLIENTS, or below `clients` of the running environment."""
        return Path(os.environ.get("SPECDEC_CLIENTS") or f"{sys.prefix}/clients") / self.name

    @property
    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        if not self.is_python and shutil.which("node") is None:
            return f"{self.name} needs Node.js; install it and {MAKE}"
        if not (self.environment / ".installed").exists():
            return f"{self.name} is not installed in {self.environment}; {MAKE}"
        return ""

    @property
    def command(self) -> list[str]:
        folder = HERE / self.name
        if self.is_python:
            python = self.environment / "bin" / "python"
            return [str(python), str(HERE / "drive.py"), str(folder / "driver.py")]
        return ["node", str(HERE / "drive.cjs"), str(folder / "driver.cjs")]

    @property
    def variables(self) -> dict[str, str]:
        """Its process's environment variables, beside those of this one."""
        return {"PYTHONSAFEPATH": "1", "NODE_PATH": str(self.environment / "node_modules")}


ONE_CHOICE = {"choices": "it shows the first choice only"}
ONE_END = {"choices": "its streams show one finish reason only"}
BAD_REQUESTS_ONLY = {
    "error.code": ("no model", "loading", "busy", "wrong key"),
    "error.param": ("no model",),
}

CLIENTS = (
    Client(
        "openai_python",
        (
            Mode("create"),
            Mode("create stream", streams=True),
            Mode("stream", streams=True),
            Mode("async create"),
            Mode("async create stream", streams=True),
            Mode("async stream", streams=True),
        ),
    ),
    Client(
        "openai_node",
        (Mode("create"), Mode("create stream", streams=True), Mode("stream", streams=True)),
    ),
    Client(
        "ai_sdk",
        (
            Mode("generateText", lacks=ONE_CHOICE),
            Mode("streamText", streams=True, lacks=ONE_CHOICE),
        ),
    ),
    Client(
        "langchain",
        (
            Mode("invoke", lacks=ONE_CHOICE),
            Mode("generate"),
            Mode("ainvoke", lacks=ONE_CHOICE),
            *(
                Mode(name, streams=True, hides={"prediction": ("prediction",)}, lacks=ONE_CHOICE)
                for name in ("stream", "astream")
            ),
        ),
    ),
    Client(
        "litellm",
        (
            Mode("completion", hides=BAD_REQUESTS_ONLY),
            Mode("completion stream", streams=True, hides=BAD_REQUESTS_ONLY, lacks=ONE_END),
            Mode("acompletion", hides=BAD_REQUESTS_ONLY),
            Mode("acompletion stream", streams=True, hides=BAD_REQUESTS_ONLY, lacks=ONE_END),
        ),
    ),
)
