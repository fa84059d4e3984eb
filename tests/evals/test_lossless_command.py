"""`specdec eval lossless`, the command: what it refuses, exit codes, files, distributions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdec.cli import app
from specdec.errors import UsageError
from specdec.evals.lossless.distribution import DistributionSettings, Drawn, compare_draws
from specdec.evals.lossless.in_process import InProcess
from specdec.evals.lossless.render_distribution import make_report
from specdec.evals.lossless.run import default_drafters
from specdec.evals.report.journal import Journal
from tests.evals.lossless_toy import config_for, samples
from tests.evals.test_lossless_bench import second_at
from tests.evals.toy_folder import write_toy
from tests.wrong_rule import verify_by


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("lossless") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    file.write_text('{"prompt": "the cat"}\n{"prompt": "who"}\n')
    return file


def run(*arguments: object) -> Any:
    """What the command gives; a UsageError is raised, as the real command line prints it."""
    given = ["eval", "lossless", *map(str, arguments)]
    return CliRunner().invoke(app, given, catch_exceptions=True)


def toy(folder: Path, data: Path, *more: object) -> Any:
    return run(
        *("--data", data, "--model", folder, "--backend", "torch", "--weights", "fp32"),
        *("--threads", 1, "--kv-memory-mib", 8, "--drafter", "prediction", *more),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verification", "typical"], "typical acceptance is lossy"),
        (["--verification", "rejection"], "test it by --distribution, or give --temperature 0"),
        (["--draws", "50"], "--draws needs --distribution"),
        (["--distribution", "--seeds", "3"], "--seeds does not go with --distribution"),
        (["--distribution", "--temperature", "0"], "--distribution needs a --temperature above 0"),
        (["--against", "http://x"], "--against needs --url"),
        (["--api-key", "x"], "--api-key needs --url"),
        (["--url", "http://x", "--weights", "int8"], "--weights is of engines in this process"),
        (["--url", "x"], "x is no address of a server"),
        (["--temperature", "hot"], "--temperature takes numbers"),
        (["--tie-margin", "inf"], "--tie-margin must be a number, not inf"),
        (["--drafter", "ngram", "--drafter", "ngram"], "--drafter ngram is given twice"),
        (["--drafter", "oracle"], "unknown drafter 'oracle'"),
        (["--verification", "hope"], "unknown verification 'hope'"),
        (["--data", "missing.jsonl"], "cannot read missing.jsonl"),
        (["--task", "chess"], "no task 'chess'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_model_is_loaded(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.evals.lossless.in_process.load_model", lambda _: 1 / 0)
    result = run(*options)
    assert isinstance(result.exception, UsageError), result.output
    assert message in str(result.exception)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("--out", tmp_path / "file")
    assert isinstance(result.exception, UsageError) and "--out" in str(result.exception)


def test_exit_codes_and_files(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("--max-tokens", 16, "--seeds", 1)
    result = toy(folder, data, *small, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["is_lossless"] and report["divergences"] == [] and report["tie_margin"] == 2**-12
    assert report["served"]["model"] == str(folder) and report["machine"]["versions"]
    assert [row["temperature"] for row in report["rows"]] == [0.0, 1.0]
    assert all(row["equal"] == row["answers"] == 2 for row in report["rows"])
    assert {one["figure"] for one in report["compared"]} == {"share of answers that differ"}
    verify_by(second_at(3), monkeypatch)
    result = toy(folder, data, *small, "--out", tmp_path, "--no-deterministic")
    assert result.exit_code == 1, result.output
    report = json.loads((tmp_path / "lossless.json").read_text())
    assert not report["is_lossless"] and not report["forgives_near_ties"]  # a CPU promises
    assert {one["position"] for one in report["divergences"]} == {3}
    assert {file.name for file in tmp_path.iterdir()} == {
        *("lossless.json", "lossless.html", "lossless-answers.csv", "lossless-divergences.csv")
    }


@pytest.mark.parametrize("rule", ["coupled", "rejection", "typical"])
def test_a_biased_rule_is_told_from_lossless_ones(
    folder: Path, data: Path, tmp_path: Path, rule: str
) -> None:
    result = toy(
        *(folder, data, "--distribution", "--verification", rule, "--draws", 200),
        *("--per-task", 1, "--out", tmp_path),
    )
    is_lossless = rule != "typical"
    assert result.exit_code == (0 if is_lossless else 1), result.output
    report = json.loads((tmp_path / "lossless-distribution.json").read_text())
    assert report["is_lossless"] is is_lossless
    assert report["settings"][0]["tokens_per_step"] > 1
    assert report["temperatures"] == [1.0]
    first = report["tests"][0]
    assert (first["position"], first["draws"]) == (0, 400)
    assert first["is_different"] is not is_lossless
    if is_lossless:
        assert first["variation"] < 2 * first["variation_by_chance"]
    else:
        assert first["variation"] > 3 * first["variation_by_chance"]
        assert "DIFFER" in result.stdout


def test_sides_have_seeds_of_their_own_and_chunks_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal seeds the coupled rule gives equal draws, which are no second sample."""
    journal = Journal(None, {})
    settings = DistributionSettings(samples()[:1], ("ngram",), (1.0,), draws=30)
    found = compare_draws(settings, InProcess(config_for(folder)), journal)
    assert len(journal) == 2
    plain, other = (
        Drawn.from_json(journal[f"{name}, 0, temperature 1.0"]) for name in ("plain", "ngram")
    )
    assert len(plain.draws) == len(other.draws) == 30 and plain.draws != other.draws
    assert all(len(draw) <= 3 for draw in plain.draws)
    assert Drawn.from_json(plain.as_json()) == plain
    monkeypatch.setattr(InProcess, "ask", lambda *_: 1 / 0)
    again = compare_draws(settings, InProcess(config_for(folder)), journal)
    assert again.counts == found.counts
    text = make_report({}, found, 30).text()
    assert "no draft was accepted" in text or found.counts["ngram", 1.0][1]


def test_a_prompt_without_room_is_refused(folder: Path) -> None:
    long = replace(samples()[0], prompt_ids=(65,) * 600)
    settings = DistributionSettings([long], ("ngram",), (1.0,), draws=30)
    with pytest.raises(UsageError, match="sample s0 does not fit the context"):
        compare_draws(settings, InProcess(config_for(folder)), Journal(None, {}))


def test_defaults_need_no_training_unless_heads_are_there() -> None:
    assert default_drafters("smollm2-135m-instruct") == (*("auto", "ngram", "suffix,medusa"),)
    assert default_drafters("other/model") == ("auto", "ngram")
