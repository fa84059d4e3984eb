"""`specdec eval compare`: reports that are read, what else differs, and what the command shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from typer.testing import CliRunner

from specdec.cli import app
from specdec.errors import UsageError
from specdec.evals.compare.comparison import Comparison
from specdec.evals.compare.differences import differences
from specdec.evals.compare.plot import LONGEST_LABEL, MOST_ROWS, forest
from specdec.evals.compare.run import Run
from specdec.evals.report.compared import Compared
from specdec.evals.report.intervals import Interval
from tests.evals.compared_entries import entry, scaled

MACHINE = {
    "processor": "Some",
    "cores": 2,
    "capability": "AVX2",
    "python": "3.12",
    "versions": {"torch": "2.13"},
}
COMMAND = "specdec eval acceptance --task chat --out x"


def data(*entries: Compared, **fields: Any) -> dict[str, Any]:
    return {
        "date": "2026-11-30",
        "command": COMMAND,
        "machine": MACHINE,
        "compared": [entry.as_json() for entry in entries],
        **fields,
    }


def write(file: Path, *entries: Compared, **fields: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data(*entries, **fields)))
    return file


def run(*args: object) -> Any:
    return CliRunner().invoke(app, ["eval", "compare", *map(str, args)])


# --- reports that are read ---


def test_a_file_or_its_folder_is_read(tmp_path: Path) -> None:
    entries = (entry(parts=scaled()), entry("ngram", interval=Interval(2, 1, 3)))
    file = write(tmp_path / "acceptance.json", *entries)
    (tmp_path / "compare.json").write_text("{}")  # what else lies there
    (tmp_path / "broken.json").write_text("{")
    for path in (file, tmp_path):
        found = Run.read(path)
        assert found.file == file
        assert found.kind == "eval acceptance"
        assert list(found.entries.values()) == list(entries)
    write(tmp_path / "second.json", *entries)
    with pytest.raises(UsageError, match=r"several reports, .*: acceptance\.json, second\.json$"):
        Run.read(tmp_path)


GOOD = entry().as_json()
DAMAGED: dict[str, Any] = {
    "not an object": [1],
    "no figure": {**GOOD, "figure": None},
    "no direction": {**GOOD, "is_higher_better": 1},
    "no value": {**GOOD, "value": None},
    "text as a value": {**GOOD, "value": "1"},
    "truth as a bound": {**GOOD, "low": True},
    "no bounds": {name: value for name, value in GOOD.items() if name != "low"},
    "endless": {**GOOD, "value": 10**400},
    "parts of text": {**GOOD, "parts": {"1": "ab"}},
    "parts of three": {**GOOD, "parts": {"1": [1, 2, 3]}},
    "parts as a list": {**GOOD, "parts": []},
}
WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([], "this is not a report: give what --out DIR or --json of a measurement writes"),
    "something else": ({"a": 1}, r"not a report: .*\(specdec eval acceptance, "),
    "a command of numbers": ({"command": 1, "compared": [GOOD]}, "this is not a report"),
    "no list": ({"command": COMMAND}, "no figures to compare: .*specdec eval acceptance, "),
    "an empty list": ({"command": COMMAND, "compared": []}, "is empty: measure something"),
    "one figure twice": (data(entry(), entry()), "has suffix / tokens per step twice"),
    **{
        name: ({"command": COMMAND, "compared": [GOOD, wrong]}, "entry 2 of `compared` is damaged")
        for name, wrong in DAMAGED.items()
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_report_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    content, reason = WRONG[name]
    file = tmp_path / "some.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=rf"^{file}: .*{reason}") as caught:
        Run.read(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"# notes", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}'])
def test_what_is_not_json_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "notes.md"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"notes\.md is not JSON: give what --out DIR"):
        Run.read(file)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^cannot read .*none: No such file or directory$"):
        Run.read(tmp_path / "none")
    with pytest.raises(UsageError, match=f"^{tmp_path} has no report to compare: give what"):
        Run.read(tmp_path)


def test_reports_of_different_commands_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "a.json", entry())
    load = write(tmp_path / "b.json", entry(), command="specdec bench load --out x")
    other = write(tmp_path / "c.json", entry("another"))
    for second, reason in (
        (load, "a.json is of specdec eval acceptance and .*b.json of specdec bench load"),
        (other, "have no figure in common"),
    ):
        found = run(one, second)
        assert found.exit_code == 2 or isinstance(found.exception, UsageError)
        with pytest.raises(UsageError, match=reason):
            Comparison.of([Run.read(one), Run.read(second)], 0.02)


# --- what else is not the same ---


def test_other_machines_models_and_settings_are_listed() -> None:
    base = data(target={"model": "a", "weights": "bf16"}, url=None, seconds=1.5, samples=[1])
    other = data(
        machine={**MACHINE, "cores": 4, "versions": {"torch": "2.13", "numpy": "2"}},
        target={"model": "a", "weights": "int8"},
        url="http://x",
        seconds=2.5,
        samples=[2],
        date="2027-01-01",
        command="specdec eval acceptance --task chat --task=qa --out y --json",
    )
    assert differences(base, base) == []
    assert [str(found) for found in differences(base, other)] == [
        "machine.cores: 2 -> 4",
        "target.weights: bf16 -> int8",
        "--task: chat -> chat qa",
        "machine.versions.numpy: - -> 2",
        "url: - -> http://x",
    ]


def test_named_settings_stand_for_the_commands_options() -> None:
    base = data(settings={"budgets": [8, 16], "long": "x" * 100})
    other = data(settings={"budgets": [8], "long": "y"}, command=f"{COMMAND} --node-budget 8")
    assert [str(found) for found in differences(base, other)] == [
        "settings.budgets: [8, 16] -> [8]",
        f"settings.long: {'x' * 57}... -> y",
    ]
    unbalanced = data(command="specdec eval acceptance 'a")
    assert [str(found) for found in differences(data(), unbalanced)] == [
        "--task: chat -> -",
        "arguments: - -> 'a",
    ]


# --- the command ---


@pytest.fixture
def reports(tmp_path: Path) -> list[Path]:
    """A base, a run with a regression, a gain and a missing figure, and one that is the same."""
    base = [
        entry("a", parts=scaled()),
        entry("b", parts=scaled()),
        entry("c", "ms", interval=Interval(10, 9.9, 10.1), is_higher_better=False),
        entry("d", parts=scaled()),
    ]
    changed = [
        entry("new", parts=scaled()),
        entry("c", "ms", interval=Interval(20, 19, 21), is_higher_better=False),
        entry("b", parts=scaled(1.2)),
        entry("a", parts=scaled(0.9)),
    ]
    return [
        write(tmp_path / "base" / "acceptance.json", *base).parent,
        write(tmp_path / "changed" / "acceptance.json", *changed, weights="int8").parent,
        write(tmp_path / "same" / "acceptance.json", *base).parent,
    ]


def test_regressions_come_first_and_are_the_exit_code(reports: list[Path]) -> None:
    found = run(*reports[:2])
    assert found.exit_code == 1
    lines = found.stdout.splitlines()
    assert lines[0] == "specdec eval acceptance: 2 runs compared"
    files = [path / "acceptance.json" for path in reports]
    assert lines[1].startswith(f"base: {files[0]}, 2026-11-30; Some, 2 cores")
    assert lines[2].startswith(f"run: {files[1]}, ")
    assert lines[3:7] == [
        "warning: not the same: weights: - -> int8",
        f"not in {files[1]}: tokens per step of d",
        f"not in {files[0]}: tokens per step of new",
        "2 worse, 1 better, 0 unsure, 0 same; marked from 2 % on, and only where the ratio's 95 % "
        "interval leaves out 1",
    ]
    rows = [line.split() for line in lines[10:]]
    assert [row[:4] for row in rows] == [
        ["!", "worse", "c", "ms"],
        ["!", "worse", "a", "tokens"],
        ["+", "better", "b", "tokens"],
    ]
    assert "(less is better)" in lines[10]


def test_without_regressions_it_ends_well(reports: list[Path]) -> None:
    assert run(reports[0], reports[2]).exit_code == 0
    assert run(*reports[:2], "--tolerance", 99).exit_code == 1, "twice the time is more"
    assert run(*reports[:2], "--tolerance", 100).exit_code == 0
    assert run(reports[1], reports[0], "--tolerance", 20).exit_code == 0


def test_several_runs_are_each_held_against_the_first(reports: list[Path]) -> None:
    found = run(*reports, "--json")
    assert found.exit_code == 1
    report = json.loads(found.stdout)
    base, changed, same = (str(path / "acceptance.json") for path in reports)
    assert [entry["file"] for entry in report["runs"]] == [base, changed, same]
    assert report["runs"][0]["machine"] == MACHINE
    assert (report["tolerance"], report["num_worse"]) == (0.02, 2)
    assert [(c["run"], c["of"], c["mark"]) for c in report["changes"]] == [
        (changed, "c", "worse"),
        (changed, "a", "worse"),
        (changed, "b", "better"),
        *((same, of, "same") for of in "abcd"),
    ]
    first = report["changes"][1]
    assert (first["ratio"], first["base"]) == pytest.approx((0.9, first["value"] / 0.9))
    assert first["low"] <= first["ratio"] <= first["high"]
    assert first["num_paired"] == 20
    assert report["differences"] == [
        {"run": changed, "field": "weights", "base": "-", "value": "int8"}
    ]
    assert report["missing"] == [
        {"file": changed, "of": "d", "figure": "tokens per step"},
        {"file": base, "of": "new", "figure": "tokens per step"},
    ]
    assert "run" in run(*reports).stdout.splitlines()[-9]


def test_the_folder_gets_table_picture_and_page(reports: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*reports, "--out", out).exit_code == 1
    assert {file.name for file in out.iterdir()} == {
        *("compare.json", "compare.html", "compare-changes.csv", "compare-ratios.png")
    }
    assert matplotlib.image.imread(out / "compare-ratios.png").shape[1] == 1500
    with pytest.raises(UsageError, match="has no report to compare"):
        Run.read(out)


def test_one_report_is_not_enough(reports: list[Path]) -> None:
    found = run(reports[0])
    assert isinstance(found.exception, UsageError) or found.exit_code == 2
    assert run("--tolerance", "-1", *reports).exit_code == 2


def test_many_figures_are_drawn_up_to_a_number_and_chance_is_told(tmp_path: Path) -> None:
    many = [entry(f"{'x' * LONGEST_LABEL}{n}", parts=scaled()) for n in range(MOST_ROWS + 5)]
    file = write(tmp_path / "a.json", *many, entry("zero", interval=Interval(0)))
    runs = [Run.read(file), Run.read(file)]
    comparison = Comparison.of(runs, 0.02)
    lines = comparison.report().text().splitlines()
    assert "by chance alone up to 2 of 66 would be called worse" in lines
    figure = forest(comparison.ordered(), 0.02, {})
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == MOST_ROWS
    assert max(map(len, labels)) == LONGEST_LABEL
    assert f"the first {MOST_ROWS} of {MOST_ROWS + 5}" in figure.get_suptitle()
