"""`specdec bench crossover`: equal answers, ratios of rounds, bounds, crossovers, the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals import bench_commands
from specdec.evals.crossover import bench as crossover
from specdec.evals.crossover.bench import Answers, CrossoverSettings, Setting
from specdec.evals.crossover.closed_loop import ClosedLoop, LoopRun, LoopStep
from specdec.evals.crossover.report import report_of
from specdec.evals.crossover.summary import Cell, bounds, cell_rows, crossovers, summary
from specdec.evals.crossover.workloads import WorkloadSettings
from specdec.evals.report import report as reports
from specdec.evals.report.report import ReportFolder
from tests.evals.toy_folder import load_or_skip, toy_config, write_toy

NAMES = ("off", "fixed:4", "adaptive")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("crossover") / "model")


# --- arithmetic ---


def run_of(speed: float, nodes: float = 0.0) -> LoopRun:
    """100 requests' step with that many nodes per request, in which 100 tokens come."""
    return LoopRun([LoopStep(100 / speed, 100, 0, 0, 100, round(100 * nodes), "off", 0.0)])


def test_ratios_are_of_rounds_and_the_best_fixed_is_the_best_median() -> None:
    """The machine is four times slower in the second round."""
    speeds = {"off": (40, 10), "fixed:4": (60, 15), "adaptive": (48, 12)}
    found = cell_rows(
        Cell("chat", 2), {name: [run_of(s) for s in rounds] for name, rounds in speeds.items()}
    )
    by_name = {row["setting"]: row for row in found}
    assert [row["best_fixed"] for row in found] == ["fixed:4"] * 3
    assert by_name["adaptive"]["over_off"] == 1.2 and by_name["off"]["over_off"] == 1.0
    assert by_name["adaptive"]["over_best_fixed"] == 0.8
    assert by_name["adaptive"]["tokens_per_second"] == 30.0
    assert (by_name["off"]["min"], by_name["off"]["max"]) == (10.0, 40.0)
    assert by_name["off"]["reasons"] == {"off": 1.0}
    (alone,) = cell_rows(Cell("chat", 2), {"adaptive": [run_of(1.0)]})
    assert alone["over_off"] is alone["over_best_fixed"] is alone["best_fixed"] is None
    prompts = LoopRun([LoopStep(1.0, 100, 1, 1, 100, 0, "off", 0.0)])
    (row, _) = cell_rows(
        Cell("chat", 2), {"off": [run_of(1.0), prompts], "adaptive": [run_of(1.0)] * 2}
    )
    assert row["decode_tokens_per_second"] is row["decode_over_off"] is None


@pytest.mark.parametrize(
    ("speed", "failed"),
    [(1.0, []), (0.95, []), (0.949, ["off"]), (0.9, ["off", "best fixed"])],
)
def test_bounds_are_marked_where_they_fail(speed: float, failed: list[str]) -> None:
    rows = cell_rows(Cell("chat", 2), {"off": [run_of(1.0)], "adaptive": [run_of(speed)]})
    (bound,) = bounds(rows)
    assert (bound["over_off"], bound["best_fixed"], bound["failed"]) == (speed, "off", failed)


def test_the_best_fixed_has_a_bound_of_its_own() -> None:
    runs = {"off": [run_of(1.0)], "fixed:4": [run_of(2.0)], "adaptive": [run_of(1.8)]}
    (bound,) = bounds(cell_rows(Cell("chat", 2), runs))
    assert (bound["best_fixed"], bound["failed"]) == ("fixed:4", ["best fixed"])
    (unknown,) = bounds(cell_rows(Cell("chat", 2), {"adaptive": [run_of(1.0)]}))
    assert unknown["failed"] == []


def made(kinds: Sequence[str] = ("chat", "random")) -> dict[str, Any]:
    """A report of made-up numbers: drafts pay up to 4 streams of chats, and never at random."""
    runs = {}
    for kind in kinds:
        for number in (8, 1, 4, 2):  # in any order
            pays = kind == "chat" and number <= 4
            fixed = number * {True: 1.5, False: 0.5}[pays]
            runs[Cell(kind, number)] = {
                "off": [run_of(number)] * 2,
                "fixed:4": [run_of(number if number == 4 else fixed, 4.0)] * 2,
                "adaptive": [run_of(max(number, fixed), (2.0 / number) if pays else 0.4)] * 2,
            }
    return {
        "date": "2026-01-01",
        "machine": {
            "processor": "a processor",
            "cores": 2,
            "capability": "AVX512",
            "versions": {"torch": "2.13"},
        },
        "target": {"model": "toy", "weights": "bf16", "kv": "auto", "backend": "native"},
        "settings": {
            "kinds": list(kinds),
            "settings": list(NAMES),
            "drafter": "suffix",
            **dict.fromkeys(("max_tokens", "rounds", "node_budget", "token_budget"), 2),
        },
        **summary(runs),
        "unequal": [],
    }


def test_a_crossover_is_the_least_concurrency_that_is_crossed() -> None:
    found = made()["crossovers"]
    assert found["chat"] == {
        "off_is_as_fast_as": {"fixed:4": 4},  # as fast is enough
        "adaptive": 8,
        "adaptive_nodes": [[1, 2.0], [2, 1.0], [4, 0.5], [8, 0.4]],
    }
    assert found["random"]["off_is_as_fast_as"] == {"fixed:4": 1}
    assert found["random"]["adaptive"] == 1
    rows = [row for row in made()["rows"] if row["kind"] == "chat" and row["concurrency"] < 4]
    never = crossovers(rows)["chat"]
    assert never["off_is_as_fast_as"] == {"fixed:4": None} and never["adaptive"] is None


def test_another_answer_is_found_wherever_it_is_given() -> None:
    answers = Answers()
    answers.check(Cell("chat", 1), "off", LoopRun(answers=[(0, (1, 2, 3)), (1, (4,))]))
    answers.check(Cell("random", 1), "off", LoopRun(answers=[(0, (7,))]))
    answers.check(Cell("chat", 4), "fixed:4", LoopRun(answers=[(1, (4,)), (0, (1, 2, 3))]))
    assert answers.unequal == []
    answers.check(Cell("chat", 4), "adaptive", LoopRun(answers=[(0, (1, 2, 9)), (1, (4, 5))]))
    where = {"kind": "chat", "concurrency": 4, "setting": "adaptive"}
    assert answers.unequal == [
        {**where, "task": 0, "num_equal": 2},
        {**where, "task": 1, "num_equal": 1},
    ]


# --- what is shown ---


def test_the_table_shows_failures_and_unequal_answers() -> None:
    report = made()
    text = report_of(report).text()
    assert "FAILS" not in text and "answers: equal" in text
    assert "chat: off is as fast as fixed:4 from 4 streams on\n" in text
    assert max(map(len, text.splitlines())) <= 100
    report["bounds"][0]["failed"] = ["off"]
    report["rows"][0]["decode_tokens_per_second"] = None
    report["unequal"] = [{**dict.fromkeys(("kind", "setting"), "x"), "task": 3, "num_equal": 5}]
    report["unequal"][0]["concurrency"] = 4
    text = report_of(report).text()
    assert "FAILS: off" in text and "ANSWERS DIFFER: 1" in text


@pytest.mark.parametrize("kinds", [("chat",), ("chat", "random")])
def test_the_plots_are_pictures(kinds: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    report = made(kinds)
    report["bounds"][0]["failed"] = ["off"]
    ReportFolder(tmp_path, "crossover").write(report_of(report))
    for name in ("throughput", "gain"):
        picture = (tmp_path / f"crossover-{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")


# --- a whole run ---


def settings_of(*names: str) -> tuple[Setting, ...]:
    return tuple(map(Setting.parse, names))


def settings_for(folder: Path, **more: Any) -> CrossoverSettings:
    """Two kinds of work, few tokens; the controller of the adaptive setting is the engine's own."""
    config = toy_config(folder, "torch")
    load_or_skip(config)
    wanted: dict[str, Any] = {
        "concurrency": (1, 3),
        "settings": settings_of(*NAMES),
        "kinds": ("chat", "random"),
        "work": WorkloadSettings(max_tokens=6),
        "rounds": 1,
        "min_requests": 2,
    }
    return CrossoverSettings(config, **{**wanted, **more})


@cache
def measured(folder: Path) -> dict[str, Any]:
    return crossover.measure(settings_for(folder))


def test_a_whole_report(folder: Path) -> None:
    report = measured(folder)
    json.dumps(report, allow_nan=False)
    assert report["unequal"] == []
    cells = [(kind, number) for kind in ("chat", "random") for number in (1, 3)]
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
    assert report["settings"]["num_requests"] == [2, 6]
    assert report["settings"]["tasks"] == {"chat": 24, "random": 24}
    assert report["target"]["weights"] == "fp32" and report["target"]["backend"] == "torch"
    assert "answers: equal" in report_of(report).text()


def test_settings_are_measured_in_another_order_each_round(folder: Path) -> None:
    configs: list[EngineConfig] = []
    run = ClosedLoop.run

    def noted(self: ClosedLoop, *arguments: Any) -> LoopRun:
        configs.append(self._engine.config)
        return run(self, *arguments)

    names = ("off", "fixed:2", "fixed:3")
    settings = settings_for(
        folder, concurrency=(2,), kinds=("random",), settings=settings_of(*names), rounds=2
    )
    settings = replace(settings, config=replace(settings.config, max_running=1))
    with patch.object(ClosedLoop, "run", noted):
        crossover.measure(settings)
    assert [config.node_budget for config in configs] == [0, 2, 3, 2, 3, 0, 3, 0, 2]
    for config in configs:
        assert (config.control, config.prefix_cache, config.max_running) == ("fixed", False, 2)


def test_a_differing_answer_is_reported_and_fails_the_command(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    run = ClosedLoop.run

    def other(self: ClosedLoop, *arguments: Any) -> LoopRun:
        found = run(self, *arguments)
        if self._engine.config.node_budget == 4:
            number, token_ids = found.answers[1]
            found.answers[1] = number, (*token_ids[:-1], token_ids[-1] ^ 1)
        return found

    settings = settings_for(
        folder, concurrency=(1,), kinds=("random",), settings=settings_of("off", "fixed:4")
    )
    with patch.object(ClosedLoop, "run", other):
        assert crossover.run(settings, tmp_path / "new" / "folder") == 1
    assert "ANSWERS DIFFER: 2" in capsys.readouterr().out  # the round that warms up counts too
    written = json.loads((tmp_path / "new" / "folder" / "crossover.json").read_text())
    assert {item["setting"] for item in written["unequal"]} == {"fixed:4"}
    assert written["unequal"][0]["num_equal"] == 5
    assert (tmp_path / "new" / "folder" / "crossover-gain.png").stat().st_size > 0


def test_streams_must_fit_into_the_cache(folder: Path) -> None:
    settings = settings_for(folder, concurrency=(400,), settings=settings_of("off"))
    with pytest.raises(UsageError, match=r"400 streams of \d+ tokens need --kv-memory-mib \d+"):
        crossover.measure(settings)


# --- the command ---


@pytest.mark.parametrize(
    ("failed", "check", "code"), [([], True, 0), (["off"], False, 0), (["off"], True, 1)]
)
def test_a_failed_bound_fails_the_command_if_it_is_to_hold(
    failed: list[str],
    check: bool,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    report = made()
    report["bounds"][0]["failed"] = failed
    asked: list[CrossoverSettings] = []

    def measure(settings: CrossoverSettings) -> dict[str, Any]:
        asked.append(settings)
        return report

    with (
        patch.object(crossover, "measure", measure),
        pytest.raises(typer.Exit) as done,
    ):
        bench_commands.crossover(
            *("1,2", ["off", "adaptive"], ["chat"]),
            quick=True,
            out=tmp_path,
            check=check,
            as_json=True,
        )
    assert done.value.exit_code == code
    assert json.loads(capsys.readouterr().out) == report
    (settings,) = asked
    assert (settings.concurrency, settings.kinds, settings.rounds) == ((1, 2), ("chat",), 2)
    assert settings.settings == settings_of("off", "adaptive")
    assert settings.work == WorkloadSettings(max_tokens=32)


def test_the_command_refuses_before_it_measures(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"concurrency": "1,x"}, "--concurrency takes numbers and commas"),
        ({"concurrency": "0,1"}, "concurrency must be at least 1"),
        ({"concurrency": "2,2"}, "name every concurrency once"),
        ({"setting": ["fixed"]}, "unknown setting 'fixed'; use off, fixed:N"),
        ({"setting": ["fixed:0"]}, "unknown setting"),
        ({"setting": ["fixed:300"]}, "node budget must be between 0 and 255"),
        ({"kind": ["poem"]}, "unknown kind 'poem'"),
        ({"data": tmp_path / "none"}, "cannot read"),
        ({"weights": "fp3"}, "unknown weights"),
        ({"out": tmp_path / "file"}, "file is a file: name a folder"),
    ]
    with patch.object(crossover, "measure", lambda settings: pytest.fail("measured")):
        for options, message in wrong:
            with (
                patch.object(reports, "find_spec", lambda name: "found"),
                pytest.raises(UsageError, match=message),
            ):
                bench_commands.crossover(**{"out": tmp_path / "out", **options})
        with (
            patch.object(reports, "find_spec", lambda name: None),
            pytest.raises(UsageError, match="draws with matplotlib"),
        ):
            bench_commands.crossover(out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
