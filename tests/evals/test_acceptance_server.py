"""`specdec eval acceptance --url`: the same figures from a server, and what others do not tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specdec.config import EngineConfig
from specdec.errors import SpecdecError, UsageError
from specdec.evals.acceptance import server as server_module
from specdec.evals.acceptance.asker import Question
from specdec.evals.acceptance.report import has_unequal
from specdec.evals.acceptance.run import AcceptanceSettings, Address, run
from specdec.evals.acceptance.server import _edited
from specdec.evals.acceptance.setting import SERVER, Sweep
from specdec.evals.client.exchange import Arrival, Exchange
from specdec.evals.data.formats import read_samples
from specdec.evals.data.sample import Sample
from specdec.metrics import SpeculationStats
from tests.evals.acceptance_case import chats
from tests.server.conftest import RunningServer, make_folder
from tests.server.real_engine import serving_weights

SAMPLES = [
    Sample("1", "chat", ({"role": "user", "content": "abcabcabcabc"},), ("abcabc?",)),
    Sample("ids", "ids", prompt_ids=(65, 66, 67, 65, 66, 67)),
    Sample("text", "text", text="1 2 1 2 1 2 1"),
]
SWEEP = Sweep(("suffix", "prediction,suffix"), node_budgets=(8,), temperatures=(0.0, 1.0))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving_weights(tmp_path_factory.mktemp("acceptance")) as running:
        yield running


def settings_for(url: str, sweep: Sweep = SWEEP) -> AcceptanceSettings:
    return AcceptanceSettings(SAMPLES, sweep, EngineConfig(), max_tokens=24, address=Address(url))


def figures_of(report: Any, name: str, *keys: str) -> list[Any]:
    entry = next(entry for entry in report.data["settings"] if entry["name"] == name)
    return [entry["all"][key] for key in keys]


def test_a_server_is_measured_as_an_engine_in_process(
    server: RunningServer, tmp_path: Path
) -> None:
    """The same model, prompts, seeds and limits: the same steps."""
    remote = run(settings_for(server.url), tmp_path)
    config = EngineConfig(model=str(server.folder), control="fixed", threads=1, kv_memory_mib=64)
    local = run(replace(settings_for(server.url), config=config, address=None))
    assert not has_unequal(remote.data)
    for setting in SWEEP.settings():
        keys = ("answers", "output_tokens", "unequal_answers", "finish_reasons")
        name = setting.name
        assert figures_of(remote, name, *keys) == figures_of(local, name, *keys)
        if setting.drafter == "suffix" or setting.is_plain:  # predictions are edited as text here
            keys = ("steps", "accepted_lengths", "drafted_per_step", "tokens_per_step")
            assert figures_of(remote, name, *keys) == figures_of(local, name, *keys)
    recorded = read_samples(tmp_path / "answers.jsonl")
    assert [sample.sample_id for sample in recorded[:2]] == ["1", "1, turn 2"]
    assert all(sample.output or sample.output_ids for sample in recorded)


def test_a_server_asked_for_nothing_is_a_setting_of_its_own(server: RunningServer) -> None:
    report = run(settings_for(server.url, Sweep((SERVER,))))
    (speed,) = figures_of(report, SERVER, "decode_speedup")
    assert speed["value"] > 0
    (draft_ms, positions) = figures_of(report, SERVER, "draft_ms_per_step", "positions")
    assert draft_ms is None, "no server tells"
    assert all(row["evaluated"] is None for row in positions)
    assert set(report.figures) >= {"positions", "tasks"}
    for draw in report.figures.values():
        draw()


def test_a_drafter_that_does_not_run_there_is_refused_at_once(server: RunningServer) -> None:
    with pytest.raises(UsageError, match=r"'medusa'.*choose from prediction, suffix"):
        run(settings_for(server.url, Sweep(("suffix", "medusa"))))
    with pytest.raises(UsageError, match="name the drafters alone"):
        settings_for(server.url, Sweep(("medusa=heads",)))


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(make_folder(tmp_path_factory.mktemp("scripted")))
    running.wait_ready()
    yield running
    running.end()


def test_a_known_stream_is_measured_as_what_it_is(scripted: RunningServer) -> None:
    """Twelve tokens and the end token at three to a step: four full steps, and one of the end."""
    asked = chats(['[[{"burst": 3}]]twelve bytes'])
    sweep = Sweep((SERVER,))
    settings = replace(settings_for(scripted.url, sweep), samples=asked)
    with pytest.raises(SpecdecError, match="drafted when it was told not to"):
        run(settings)
    with server_module.Server.open(scripted.url, sweep.settings()) as server:
        question = Question(asked[0], (), 0, 40)
        reply = server.ask(question, sweep.settings()[1], None)
    assert reply.text == "twelve bytes" and reply.measured.num_output == 13
    counts = reply.measured.counts
    assert counts is not None and counts.histogram == (1, 0, 4) and counts.num_steps == 5


class Other:
    """A server that is not ours. `stats` are what it tells of each answer."""

    root = "http://other"
    stats: SpeculationStats | None = None
    outcome, status, error = "ok", 200, ""

    def __init__(self, *_: object, **__: object) -> None:
        self.bodies: list[Mapping[str, Any]] = []
        Other.last = self

    last: Other

    async def __aenter__(self) -> Other:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def model(self) -> str:
        return "theirs"

    async def ask(self, route: str, body: Mapping[str, Any]) -> Exchange:
        self.bodies.append(body)
        is_long = len(str(body)) > 2000
        return Exchange(
            0.0,
            1.0,
            "error" if is_long else self.outcome,  # type: ignore[arg-type]  # one of the words of Outcome
            400 if is_long else self.status,
            "longer than the context" if is_long else self.error,
            (Arrival(0.2, None), Arrival(0.9, None)),
            "said",
            "stop",
            5,
            4,
            stats=self.stats,
        )


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> type[Other]:
    monkeypatch.setattr(server_module, "Endpoint", Other)
    return Other


def test_another_server_gets_the_prompt_alone_and_nothing_is_invented(other: type[Other]) -> None:
    report = run(settings_for("http://other", Sweep((SERVER,))))
    assert [entry["name"] for entry in report.data["settings"]] == [SERVER]
    total = report.data["settings"][0]["all"]
    assert total["answers"] == 4 and total["prefill_ms"] == 200
    for name, value in total.items():
        if name not in ("answers", "output_tokens", "prefill_ms", "finish_reasons"):
            told = value.values() if isinstance(value, dict) else [value]
            assert not any(told), name
    assert "equals" not in report.text() and not report.figures
    asked = other.last.bodies[2:]  # after two probes
    assert len(asked) == 4 and not any("speculation" in body for body in asked)
    assert not any("return_token_ids" in body for body in asked)


def test_another_server_that_counts_is_believed(
    other: type[Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = SpeculationStats()
    stats.observe_step([("x",)] * 2, [("x",)])
    monkeypatch.setattr(other, "stats", stats)
    report = run(settings_for("http://other", Sweep((SERVER,))))
    total = report.data["settings"][0]["all"]
    assert total["tokens_per_step"]["token_weighted"]["value"] == 2
    with pytest.raises(UsageError, match="takes no drafters"):
        run(settings_for("http://other", Sweep(("suffix",))))
    with pytest.raises(UsageError, match="takes no drafters"):
        run(settings_for("http://other", Sweep((SERVER,), node_budgets=(4,))))


def test_prompts_that_a_server_finds_too_long_are_skipped(other: type[Other]) -> None:
    samples = chats(["short", "long " * 500])
    settings = replace(settings_for("http://other", Sweep((SERVER,))), samples=samples)
    assert run(settings).data["num_skipped"] == 1


def test_a_server_that_fails_ends_the_run_with_its_words(
    other: type[Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other, "outcome", "overloaded")
    monkeypatch.setattr(other, "error", "come back later")
    with pytest.raises(UsageError, match="come back later"):
        run(settings_for("http://other", Sweep((SERVER,))))


def test_a_server_of_ours_is_told_what_to_draft_and_what_to_expect(
    other: type[Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other, "stats", SpeculationStats(num_steps=1))
    sweep = Sweep(("suffix", "synthetic", "prediction,suffix"), (4,), (2,))
    run(replace(settings_for("http://other", sweep), samples=chats(["hm"])))
    asked = {str(body.get("speculation")): body for body in other.last.bodies[-4:]}
    limits = {"max_nodes": 4, "max_depth": 2}
    expected = {
        str({"enabled": False}): None,
        str({"drafters": ["suffix"], **limits}): None,
        str({"drafters": ["synthetic"], **limits}): "said",
        str({"drafters": ["prediction", "suffix"], **limits}): _edited("said", body_seed(asked)),
    }
    assert asked.keys() == expected.keys()
    for speculation, text in expected.items():
        body = asked[speculation]
        assert body.get("prediction", {}).get("content") == text
        assert body["return_token_ids"] is True and body["seed"] == body_seed(asked)


def body_seed(asked: Mapping[str, Mapping[str, Any]]) -> int:
    (seed,) = {body["seed"] for body in asked.values()}
    return int(seed)


def test_a_predicted_text_has_three_places_wrong() -> None:
    text = "".join(chr(0x4E00 + number) for number in range(600))  # without a space
    found = _edited(text, 7)
    assert len(found) == len(text) and found == _edited(text, 7) != _edited(text, 8)
    kept = set(pairwise(found)) & set(pairwise(text))
    assert 550 < len(kept) < 595
    assert _edited("", 1) == ""
