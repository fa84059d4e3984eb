"""`specdec bench crossover`: sides in turn, equal answers, going on, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner, Result

from specdec.cli import app
from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals.crossover import bench as crossover
from specdec.evals.crossover.closed_loop import ClosedLoop
from specdec.evals.crossover.command import parse_streams
from specdec.evals.crossover.loop_run import CellRun, LoopRun
from specdec.evals.crossover.report import crossover_report
from specdec.evals.crossover.settings import CrossoverSettings
from specdec.evals.crossover.side import Setting
from specdec.evals.crossover.workloads import RANDOM
from specdec.evals.data.sample import Sample
from specdec.evals.report import report as reports
from specdec.evals.report.journal import Journal
from tests.evals.test_crossover_report import NAMES, made
from tests.evals.toy_folder import load_or_skip, toy_config, write_toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("crossover") / "model")


# --- a whole run ---

CHATS = tuple(
    Sample(f"chat {n}", "chat", ({"role": "user", "content": f"Why {n}?"},)) for n in range(3)
)


def settings_of(*names: str) -> tuple[Setting, ...]:
    return tuple(map(Setting.parse, names))


def settings_for(folder: Path, **more: Any) -> CrossoverSettings:
    """Two kinds of work, few tokens; the controller of the adaptive setting is the engine's own."""
    config = toy_config(folder, "torch")
    load_or_skip(config)
    wanted: dict[str, Any] = {
        "concurrency": (1, 3),
        "settings": settings_of(*NAMES),
        "samples": CHATS,
        "kinds": ("chat", RANDOM),
        "max_tokens": 6,
    }
    return CrossoverSettings(config, **{**wanted, **more})


def measured(settings: CrossoverSettings, file: Path | None = None) -> dict[str, Any]:
    with Journal(file, settings.as_json()) as journal:
        return crossover.measure(settings, settings.check(), journal)


def test_a_whole_report(folder: Path) -> None:
    report = measured(settings_for(folder))
    json.dumps(report, allow_nan=False)
    assert report["unequal"] == []
    cells = [(kind, number) for kind in ("chat", RANDOM) for number in (1, 3)]
    assert [(row["kind"], row["concurrency"], row["setting"]) for row in report["rows"]] == [
        (*cell, name) for cell in cells for name in NAMES
    ]
    assert [(bound["kind"], bound["concurrency"]) for bound in report["bounds"]] == cells
    for row in report["rows"]:
        assert len(row["rounds"]) == 1 and row["min"] <= row["tokens_per_second"] <= row["max"]
        assert row["tokens_per_step"] >= 1 and row["rows_per_step"] >= 1
        assert sum(row["reasons"].values()) == pytest.approx(1, abs=1e-3)
        if row["setting"] == "off":
            assert (row["nodes_per_request"], row["over_off"]) == (0, 1)
        if row["setting"] != "adaptive":
            assert list(row["reasons"]) == ["fixed"]
    assert report["settings"]["tasks"] == {"chat": 3, RANDOM: 24}
    assert report["target"]["weights"] == "fp32" and report["target"]["backend"] == "torch"
    assert len(report["compared"]) == len(report["rows"])
    assert "answers: ours equal" in crossover_report(report).text()


def test_sides_are_measured_in_another_order_each_time(folder: Path) -> None:
    configs: list[EngineConfig] = []
    run = ClosedLoop.run

    def noted(self: ClosedLoop, *arguments: Any, **more: Any) -> LoopRun:
        configs.append(self._engine.config)
        return run(self, *arguments, **more)

    names = ("off", "fixed:2", "fixed:3")
    settings = settings_for(
        folder, concurrency=(2,), kinds=("chat",), settings=settings_of(*names), rounds=2
    )
    settings = replace(settings, config=replace(settings.config, max_running=1))
    with patch.object(ClosedLoop, "run", noted):
        measured(settings)
    assert [config.node_budget for config in configs] == [0, 2, 3, 0, 2, 3, 2, 3, 0]
    for config in configs:
        assert (config.control, config.prefix_cache, config.max_running) == ("fixed", False, 2)
    assert {config.drafter for config in configs if not config.node_budget} == {"none"}


def test_an_interrupted_run_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    """What is finished is not measured again, and right answers are still those of before."""
    settings = settings_for(folder, kinds=("chat",), settings=settings_of("off", "adaptive"))
    file = tmp_path / "part.jsonl"
    add, keys = Journal.add, list[str]()

    def add_two(self: Journal, key: str, record: Any) -> None:
        add(self, key, record)
        keys.append(key)
        if len(keys) == 3:
            raise KeyboardInterrupt

    with patch.object(Journal, "add", add_two), pytest.raises(KeyboardInterrupt):
        measured(settings, file)
    assert keys == [
        "answers",
        "round 1, chat, 1 streams: off",
        "round 1, chat, 1 streams: adaptive",
    ]
    before = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    with patch.object(Journal, "add", add_two):
        keys += ["never three"]
        report = measured(settings, file)
    assert keys[4:] == ["round 1, chat, 3 streams: adaptive", "round 1, chat, 3 streams: off"]
    first = CellRun.from_json(before[1]["record"])
    assert report["rows"][0]["rounds"] == [round(first.tokens_per_second, 3)]
    with patch.object(ClosedLoop, "run", lambda *_: pytest.fail("measured again")):
        assert measured(settings, file)["rows"] == report["rows"]
    with pytest.raises(UsageError, match="of a run with other settings"):
        measured(replace(settings, samples=CHATS[:2]), file)


def test_streams_must_fit_into_the_cache(folder: Path) -> None:
    settings = settings_for(folder, concurrency=(400,), settings=settings_of("off"))
    with pytest.raises(UsageError, match=r"400 streams of \d+ tokens need --kv-memory-mib \d+"):
        measured(settings)


@pytest.mark.parametrize(
    ("num_streams", "num_tasks", "num_requests"),
    [(1, 5, 6), (4, 5, 12), (16, 5, 48), (1, 1, 3), (16, 24, 48), (2, 5, 8)],
)
def test_every_stream_answers_as_often_and_every_task_is_asked(
    num_streams: int, num_tasks: int, num_requests: int
) -> None:
    assert CrossoverSettings.num_requests(num_streams, num_tasks) == num_requests


# --- the command ---


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """The options of a small run over the toy."""
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"Why {n}?", "task": "chat"}) for n in "ab"))
    return [*("--data", str(file)), *("--concurrency", "1,2"), *("--max-tokens", "6")]


def run_command(*options: str) -> Result:
    with patch.object(reports, "find_spec", lambda name: "found"):
        return CliRunner().invoke(app, ["bench", "crossover", *options])


def test_a_differing_answer_is_reported_and_fails_the_command(
    folder: Path, tmp_path: Path, data: list[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    run = ClosedLoop.run

    def other(self: ClosedLoop, *arguments: Any, **more: Any) -> LoopRun:
        found = run(self, *arguments, **more)
        if self._engine.config.node_budget == 4:
            first, (*most, last) = found.answers[0], found.answers[1] or ()
            answers = (first, (*most, last ^ 1), *found.answers[2:])
            found = replace(found, answers=answers)
        return found

    out = tmp_path / "new" / "folder"
    config = toy_config(folder, "torch")
    toy = [*("--model", config.model), *("--weights", "fp32"), *("--backend", "torch")]
    toy += [*("--threads", "1"), *("--kv-memory-mib", "8"), *("--out", str(out))]
    ours = [*("--setting", "off"), *("--setting", "fixed:4"), *("--kind", "chat")]
    load_or_skip(config)
    with patch.object(ClosedLoop, "run", other):
        found = run_command(*data, *toy, *ours)
    assert found.exit_code == 1, found.output
    assert "ANSWERS DIFFER: 2" in found.output  # at each concurrency; the warm-up is not counted
    written = json.loads((out / "crossover.json").read_text())
    assert {item["setting"] for item in written["unequal"]} == {"fixed:4"}
    assert {item["num_equal"] for item in written["unequal"]} == {5}
    assert sorted(file.suffix for file in out.iterdir()) == sorted(
        [".json", ".html", *[".png"] * 3, *[".csv"] * 3]
    )


@pytest.mark.parametrize(
    ("failed", "check", "code"), [([], True, 0), (["off"], False, 0), (["off"], True, 1)]
)
def test_a_failed_bound_fails_the_command_if_it_is_to_hold(
    failed: list[str], check: bool, code: int
) -> None:
    report = made()
    report["bounds"][0]["failed"] = failed
    asked: list[CrossoverSettings] = []

    def measure(settings: CrossoverSettings, servers: Any, journal: Any) -> dict[str, Any]:
        asked.append(settings)
        return report

    options = ["--concurrency", "1,2", "--kind", "chat", "--quick", "--json"]
    with patch.object(crossover, "measure", measure):
        found = run_command(*options, *["--check"] * check)
    assert found.exit_code == code
    assert json.loads(found.stdout) == report
    (settings,) = asked
    assert (settings.concurrency, settings.kinds, settings.rounds) == ((1, 2), ("chat",), 1)
    assert settings.settings == settings_of("off", "fixed:4", "fixed:16", "adaptive")
    assert settings.max_tokens == 32
    assert [sample.task for sample in settings.samples].count("chat") == 2


def test_without_kinds_all_are_asked_and_peers_are_not_asked_what_is_made_here() -> None:
    config = EngineConfig()
    ours = CrossoverSettings(config, (1,), settings_of("off"), samples=CHATS)
    assert ours.kinds == ("chat", "predicted edit", "random")
    sides = settings_of("off", "adaptive")
    vs = CrossoverSettings(config, (1,), sides, ("openvino",), samples=CHATS)
    assert vs.kinds == ("chat",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--concurrency 1,x", "--concurrency takes numbers and commas"),
        ("--concurrency 0,1", "concurrency must be at least 1"),
        ("--concurrency 2,2", "name every concurrency once"),
        ("--setting fixed", "unknown setting 'fixed'; use off, fixed:N"),
        ("--setting fixed:0", "unknown setting"),
        ("--setting fixed:300", "node budget must be between 0 and 255"),
        ("--kind poem", "unknown kind 'poem'; choose from chat, code edit"),
        ("--data none.jsonl", "cannot read"),
        ("--weights fp3", "unknown weights"),
        ("--vs openvino --kind random", "--kind random is not asked of peers"),
        ("--vs openvino --setting off", "held against --setting adaptive"),
        ("--vs openvino", "--vs openvino needs --openvino-model"),
        ("--vs llama.cpp", "llama.cpp is not measured with many streams"),
    ],
)
def test_the_command_refuses_before_it_measures(options: str, message: str, tmp_path: Path) -> None:
    with patch.object(crossover, "measure", lambda *_: pytest.fail("measured")):
        found = run_command(*options.split())
    assert isinstance(found.exception, UsageError)
    assert message in str(found.exception)


def test_the_command_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with patch.object(crossover, "measure", lambda *_: pytest.fail("measured")):
        found = run_command("--out", str(tmp_path / "file"))
    assert "file is a file: name a folder" in str(found.exception)


def test_streams_are_numbers() -> None:
    assert parse_streams("1,4,16") == (1, 4, 16)
