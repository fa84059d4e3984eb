"""Machine: what a report is from, without a server's key"""

from __future__ import annotations

import json
import sys

import pytest

from specdec.config import EngineConfig
from specdec.evals.report.machine import machine_line, origin, target
from tests.toy import toy_model

# --- what it is from ---


@pytest.mark.parametrize(
    "given",
    [["--api-key", "hush"], ["--api-key=hush"], ["--url", "u", "--api-key", "hush", "--json"]],
)
def test_a_servers_key_is_not_written_down(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["specdec", "eval", "lossless", *given])
    command = origin()["command"]
    assert "hush" not in command and "--api-key" in command
    assert command.endswith("--json") == ("--json" in given)


def test_the_origin_has_date_command_machine_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/specdec", "eval", "acceptance", "--task", "code edit"])
    found = origin("numpy", "not-installed-anywhere")
    assert list(found) == ["date", "command", "machine"]
    assert found["command"] == "specdec eval acceptance --task 'code edit'"
    versions = found["machine"]["versions"]
    assert list(versions) == ["specdec-server", "torch", "numpy"]
    assert found["machine"]["cores"] >= 1
    assert "numpy" in machine_line(found["machine"])
    json.dumps(found, allow_nan=False)


def test_the_target_names_model_and_precisions() -> None:
    config = EngineConfig(model="some", weights="fp32", kv="fp32")
    model = toy_model().model
    assert target(config, model) == {
        "model": "some",
        "weights": "fp32",
        "kv": "fp32",
        "backend": "torch",
    }
