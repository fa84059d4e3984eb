"""What the server says when it is ready, and the options of `specdec serve`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import typer.testing

from specdec.cli import app
from specdec.config import AUTO, EngineConfig
from specdec.server import serve as serve_module
from specdec.server.announcement import announcement
from specdec.server.engine_client import ENGINE_COMMAND
from specdec.server.engine_facts import EngineFacts, SelfTest, engine_facts
from specdec.server.messages import Ready
from specdec.server.service import Service
from specdec.server.settings import DEFAULTS, ServerSettings
from specdec.server.supervisor import Supervisor
from tests.server.conftest import RunningServer, make_folder
from tests.server.real_engine import add_weights
from tests.toy import compiled_native

if TYPE_CHECKING:
    from pathlib import Path


def said(config: EngineConfig, facts: EngineFacts | None, **settings: Any) -> list[str]:
    reason = "int4 weights: 4 ms a step, bf16 8" if config.drafter == AUTO else ""
    ready = Ready(
        *("m", "/models/m", "prediction,suffix", 512, 300),
        facts=facts,
        node_budget=16 if config.node_budget is None else config.node_budget,
        reason=reason,
    )
    service = Service(Supervisor(), "toy", ServerSettings(**settings))
    return announcement("http://127.0.0.1:1", config, ready, service).splitlines()


def test_the_first_line_is_for_programs_and_the_rest_for_people() -> None:
    facts = EngineFacts(2**28, 2**20, 100, 32, 2**16, SelfTest(100.0, 217.0))
    assert said(EngineConfig(), facts) == [
        "ready: http://127.0.0.1:1 (model toy, drafter prediction,suffix)",
        "  chosen   int4 weights: 4 ms a step, bf16 8",
        "  model    m in /models/m; context 512 tokens",
        "  drafts   prediction,suffix; adaptive, at most 16 nodes a step",
        "  memory   weights 256 MiB, drafters 1 MiB, KV cache 6 MiB, 100 blocks for 3200 tokens",
        "  access   everybody; --api-key-file asks for a key",
        "  speed    100 tokens/s plain, 217 with speculation: 2.17x on a list that repeats itself",
    ]


def test_nothing_is_made_up() -> None:
    lines = said(EngineConfig(drafter="suffix", node_budget=0), None, api_keys=("hush",))
    assert lines[2:] == ["  drafts   none: plain decoding", "  access   who has the API key"]
    lines = said(
        EngineConfig(drafter="suffix", control="fixed"), None, api_keys=("hush", "hush-hush")
    )
    assert lines[2] == "  drafts   prediction,suffix; fixed, always up to 16 nodes a step"
    assert lines[3] == "  access   who has one of 2 API keys"
    assert engine_facts(object(), is_tested=True) is None


@pytest.mark.parametrize("is_tested", [False, True])
def test_a_real_engine_measures_itself(tmp_path: Path, is_tested: bool) -> None:
    compiled_native()
    add_weights(make_folder(tmp_path))
    server = RunningServer(tmp_path, engine_command=ENGINE_COMMAND, self_test=is_tested)
    try:
        server.wait_ready()
        body = {"model": "toy", "prompt": "abc", "max_tokens": 8}
        assert server.post("/v1/completions", body).status == 200
        facts = server.get("/debug/load").json
        assert (facts["running"], facts["kv_used"]) == (0, 0), "it leaves nothing running"
    finally:
        server.process.terminate()
        lines = server.said.rest(timeout_s=15).splitlines()
        server.end()
    assert re.fullmatch(r"  chosen   drafter prediction,suffix; at most \d+ nodes a step", lines[0])
    assert re.fullmatch(r"  memory   weights \d+ MiB, .* for \d+ tokens", lines[3]), lines
    speed = r"  speed    \d+ tokens/s plain, \d+ with speculation: \d+\.\d\dx on a list .*"
    assert [bool(re.fullmatch(speed, line)) for line in lines[5:]] == [True] * is_tested


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[EngineConfig, ServerSettings]:
    """What `specdec serve` makes of its options."""
    seen: list[Any] = []
    monkeypatch.setattr(serve_module, "serve", lambda *args, **more: seen.append((*args, more)))
    result = typer.testing.CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 0, result.output
    ((config, settings, _),) = seen
    return config, settings


def test_without_options_the_defaults_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_API_KEYS", raising=False)
    assert run(monkeypatch) == (EngineConfig(), DEFAULTS)


def test_every_setting_has_an_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDEC_API_KEYS", "b")
    keys = tmp_path / "keys"
    keys.write_text("a\n")
    keys.chmod(0o600)
    options = [
        *("--api-key-file", str(keys), "--cors-origin", "https://a.b", "--cors-origin", "*"),
        *("--strict-params", "--force-usage", "--allow-request-templates", "--access-log"),
        "--no-self-test",
    ]
    numbers = {
        "max-queued-requests": 1,
        "max-queued-tokens": 2,
        "rate-limit": 3,
        "max-body-len": 4,
        "max-header-len": 5,
        "header-timeout": 6,
        "body-timeout": 7,
        "queue-timeout": 8,
        "first-token-timeout": 9,
        "total-timeout": 10,
        "send-timeout": 11,
        "template-timeout": 12,
        "grace": 13,
        "hang": 14,
        "shadow": 1,
    }
    for name, value in numbers.items():
        options += [f"--{name}", str(value)]
    settings = run(monkeypatch, *options)[1]
    assert (settings.api_keys, settings.cors_origins) == (("a", "b"), ("https://a.b", "*"))
    changed = vars(settings)
    assert [name for name, value in vars(DEFAULTS).items() if changed[name] == value] == []
    named = {name.removesuffix("_s"): value for name, value in changed.items()}
    assert {
        name.replace("-", "_"): value for name, value in numbers.items()
    }.items() <= named.items()
