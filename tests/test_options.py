"""Options: a command's engine options become its configuration, whoever calls it."""

from __future__ import annotations

import inspect
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.options import ENGINE_OPTIONS, engine_options

GIVEN: list[tuple[str, EngineConfig, bool]] = []


@engine_options("model", "threads", kv_memory_mib=512)
def command(
    text: Annotated[str, typer.Argument(help="Some text.")] = "a",
    *,
    config: EngineConfig,
    loud: Annotated[bool, typer.Option("--loud")] = False,
) -> None:
    """Say it."""
    GIVEN.append((text, config, loud))


def invoked(*arguments: str) -> tuple[str, EngineConfig, bool]:
    app = typer.Typer()
    app.command()(command)
    found = CliRunner().invoke(app, arguments)
    if found.exception is not None:
        raise found.exception
    return GIVEN[-1]


def test_options_become_the_configuration() -> None:
    assert invoked() == ("a", EngineConfig(kv_memory_mib=512), False)
    assert invoked("b", "--threads", "1", "--kv-memory-mib", "8", "--loud") == (
        *("b", EngineConfig(threads=1, kv_memory_mib=8)),
        True,
    )
    with pytest.raises(UsageError, match="threads must be at least 1"):
        invoked("--threads", "0")


def test_a_call_in_python_has_the_same_defaults() -> None:
    command(text="c", model="m")
    assert GIVEN[-1] == ("c", EngineConfig(model="m", kv_memory_mib=512), False)
    with pytest.raises(TypeError):
        command(kv="int8")


def test_the_options_stand_where_the_configuration_stood() -> None:
    names = list(inspect.signature(command).parameters)
    assert names == ["text", "model", "threads", "kv_memory_mib", "loud"]

    @engine_options(but=("max_running",))
    def every(config: EngineConfig) -> None: ...

    assert set(inspect.signature(every).parameters) == set(ENGINE_OPTIONS) - {"max_running"}


def test_every_option_is_a_field_with_its_default() -> None:
    assert set(ENGINE_OPTIONS) <= set(EngineConfig.__dataclass_fields__)
