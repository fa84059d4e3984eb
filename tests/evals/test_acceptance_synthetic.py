"""Acceptance of known rates is measured as what it is, with every identity between the counts."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from specdec.evals.acceptance.bench import Found
from specdec.evals.acceptance.in_process import InProcess
from specdec.evals.acceptance.report import report_of
from specdec.evals.acceptance.setting import Sweep
from specdec.evals.data.sample import Sample
from specdec.evals.report.report import Report
from tests.evals.acceptance_case import asked
from tests.evals.toy_folder import load_or_skip, toy_config, write_toy

RATES = (0.8, 0.6, 0.4)
DRAFTER = "synthetic=0.8:0.6:0.4"
SWEEP = Sweep((DRAFTER,), node_budgets=(8,), temperatures=(0.0, 1.0))
SIGMAS = 5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    config = toy_config(write_toy(tmp_path_factory.mktemp("synthetic") / "model"), "native")
    rng = random.Random(0)
    samples = [
        Sample(str(number), f"task {number % 2}", prompt_ids=tuple(rng.choices(range(256), k=8)))
        for number in range(16)
    ]
    engines = InProcess(config, SWEEP.settings(), loaded=load_or_skip(config))
    return asked(engines, samples, max_tokens=120)


@pytest.fixture(scope="module")
def report(found: Found) -> Report:
    head = {"max_tokens": 120, "weights": "fp32"}
    return report_of(head, SWEEP.settings(), found, lambda _: True)


@pytest.fixture(scope="module")
def entries(report: Report) -> list[dict[str, Any]]:
    return [entry["all"] for entry in report.data["settings"] if entry["drafter"] == DRAFTER]


def test_rates_by_position_are_the_drafters(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        steps = entry["steps"]
        assert steps > 300
        for rate, row in zip(RATES, entry["positions"], strict=True):
            number = row["verified"]  # of chains, a node for each step that reached so far
            bound = SIGMAS * math.sqrt(rate * (1 - rate) / number)
            assert abs(row["accepted"] / number - rate) < bound, row
            # Near the end of an answer there is less left to guess than there are rates.
            missing = (steps - number) / steps
            assert abs(row["accepted_per_step"]["value"] - rate) < bound + missing, row
            assert row["cut_by_stop"] == row["cut_by_length"] == 0  # what comes later is unknown
        first, second, _ = entry["positions"]
        # A step that judged position 2 accepted position 1.
        assert second["evaluated"] <= first["accepted"]


def test_tokens_per_step_are_one_and_the_sum_over_positions(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        by_position = sum(row["accepted_per_step"]["value"] for row in entry["positions"])
        tokens = entry["tokens_per_step"]["token_weighted"]["value"]
        assert tokens == pytest.approx(1 + by_position, abs=1e-12)
        error = SIGMAS * math.sqrt(len(RATES) ** 2 / entry["steps"])
        assert abs(tokens - (1 + sum(RATES))) < error


def test_counts_agree_with_each_other(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        lengths = entry["accepted_lengths"]
        assert sum(lengths) == entry["steps"]
        num_accepted = sum(length * steps for length, steps in enumerate(lengths))
        assert num_accepted == sum(row["accepted"] for row in entry["positions"])
        assert entry["accepted_per_step"] == num_accepted / entry["steps"]
        assert entry["sources"]["synthetic"]["accepted"] == num_accepted
        for row in entry["positions"]:
            assert row["verified"] >= row["evaluated"] >= row["accepted"]
        assert entry["unequal_answers"] == 0


def test_output_tokens_are_those_of_the_steps(found: Found) -> None:
    """Each step gives its accepted tokens and the bonus token, unless the end came before it."""
    for record in found.answers:
        counts = record.measured.counts
        assert counts is not None
        without_bonus = counts.num_steps + counts.num_accepted - record.measured.num_output
        assert without_bonus in (0, 1), record


def test_plain_decoding_has_one_token_per_step(found: Found) -> None:
    plain = [record for record in found.answers if record.setting.startswith("none")]
    assert len(plain) == 32
    for record in plain:
        counts = record.measured.counts
        assert counts is not None and counts.num_verified == counts.num_accepted == 0
        assert counts.num_zero_draft == counts.num_steps == record.measured.num_output


def test_a_temperature_has_its_own_plain_answer(found: Found) -> None:
    by_setting: dict[str, list[int]] = {}
    for line in found.recorded:
        by_setting.setdefault(line["task"], []).append(len(line["output_ids"]))
    assert sum(map(len, by_setting.values())) == 16, "recorded at the first temperature alone"


def test_there_is_a_whole_report(report: Report, tmp_path: Path) -> None:
    assert set(report.figures) == {"positions", "tasks", "accepted-lengths", "temperature"}
    for draw in report.figures.values():
        draw().savefig(tmp_path / "picture.png")
    of = {(entry["of"], entry["figure"]) for entry in report.data["compared"]}
    name = f"{DRAFTER}, T 1, task 1"
    assert (name, "tokens per step") in of and (name, "decode speed-up") in of
    for entry in report.data["compared"]:
        above, below = map(sum, zip(*entry["parts"].values(), strict=True))
        assert entry["value"] == pytest.approx(above / below)
