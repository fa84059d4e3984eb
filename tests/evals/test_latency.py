"""`specdec bench latency`: its arithmetic, whole reports of a toy model, the trend, the command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from specdec.config import Backend, EngineConfig
from specdec.errors import UsageError
from specdec.evals.data.sample import Sample
from specdec.evals.latency import bench, lineup
from specdec.evals.latency.answer_summary import BASELINE
from specdec.evals.latency.answers import Answers, Place
from specdec.evals.latency.report import latency_report
from specdec.evals.latency.settings import LatencySettings
from specdec.evals.latency.side import Side
from specdec.evals.report.journal import Journal
from tests.evals.latency_case import (
    CONTEXTS,
    REPEATS,
    ROUNDS,
    ROWS,
    SAMPLES,
    echo_peer,
    measured,
    toy_settings,
)
from tests.evals.toy_folder import load_or_skip, toy_config, write_toy

BACKENDS: tuple[Backend, ...] = ("torch", "native")
FIXED, ADAPTIVE = "specdec, ngram", "specdec, suffix, adaptive"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("latency") / "model")


@cache
def report_of(folder: Path, backend: Backend) -> dict[str, Any]:
    """A whole report with peers."""
    load_or_skip(toy_config(folder, backend))
    return measured(toy_settings(folder, backend))


# --- the report ---


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_report_is_whole(folder: Path, backend: Backend) -> None:
    found = report_of(folder, backend)
    json.dumps(found, allow_nan=False)
    assert found["target"]["backend"] == backend and found["target"]["weights"] == "fp32"
    assert found["target"]["threads"] == 1
    assert found["settings"]["ours"] == FIXED
    assert found["chosen"][FIXED]["drafter"] == "ngram"
    assert found["chosen"][ADAPTIVE]["control"] == "adaptive"
    sizes = [(cell["context"], cell["rows"]) for cell in found["steps"]]
    assert sizes == [(context, rows) for context in CONTEXTS for rows in ROWS]
    for cell in found["steps"]:
        assert cell["num_steps"] == ROUNDS * REPEATS
        assert cell["step_ms"]["p50"] >= cell["forward_ms"]["p50"] > 0
        assert cell["step_per_floor"] >= cell["step_per_floor_with_kv"] > 0
    assert len(found["bandwidth"]["rounds"]) == found["settings"]["rounds"] == ROUNDS
    assert found["streams"]["num_streams"] == 2
    [answers] = found["temperatures"]
    assert answers["temperature"] == 0
    assert set(answers["breakdown"]) == {BASELINE, FIXED, ADAPTIVE}
    assert answers["breakdown"][BASELINE]["rows"] == 1.0
    # The first token comes with the prompt; what warmed up is not counted.
    num_tokens = sum(task["num_tokens"] for task in answers["tasks"].values())
    assert answers["breakdown"][BASELINE]["steps"] == ROUNDS * (num_tokens - len(SAMPLES))
    assert [answers["tasks"][task]["num_prompts"] for task in ("chat", "echo")] == [1, 2]
    settings = ["echo:lookup=1", "echo:lookup=3"]
    for task in answers["tasks"].values():
        assert list(task["contenders"]) == [BASELINE, FIXED, ADAPTIVE, "echo", *settings]
        for name in (FIXED, ADAPTIVE):
            assert task["contenders"][name]["num_equal"] == task["num_tokens"] <= 16
        assert task["contenders"]["echo"]["tokens_per_second"] == 1.0
        assert task["contenders"]["echo"]["ttft_ms"]["p99"] == 1000.0
    assert list(answers["prompts"]) == [sample.sample_id for sample in SAMPLES]
    for prompt in answers["prompts"].values():
        assert prompt["best"] == {"echo:lookup": "echo:lookup=3"}
    assert len(answers["ratios"]) == 2 + 3 * 4
    assert found["temperature_ratios"] == []
    assert found["prefill"]["num_tokens"] == 30
    assert found["prefill"]["seconds"]["echo"] == 1.0
    stages = [stage["after"] for stage in found["memory"]["stages"]]
    own = ["start", BASELINE, FIXED, ADAPTIVE]
    assert stages == [*own, "echo", "echo:lookup", "what measures"]
    assert found["memory"]["kv_cache_bytes"] == 8 * 2**20


def test_everybody_is_asked_the_same_in_turn(folder: Path) -> None:
    """Each prompt at both temperatures, in every round, beginning with another contender."""
    settings = toy_settings(folder, "torch", temperatures=(0.0, 0.5))
    with echo_peer() as peer, Journal(None, {}) as journal:
        found = bench.measure(settings, settings.check(), journal)
    warm, asked = peer.asked[:6], peer.asked[6:]
    assert [(lookup, question.temperature) for lookup, question in warm] == [
        (lookup, temperature) for lookup in (None, 1, 3) for temperature in (0.0, 0.5)
    ]
    longest = max((q for _, q in asked if q.messages), key=lambda q: len(q.prompt_ids))
    assert {question.prompt_ids for _, question in warm} == {longest.prompt_ids}
    unseen = [
        question for _, question in asked if question.num_tokens == 1 and not question.messages
    ]
    assert len({question.prompt_ids for question in unseen}) == 1 + ROUNDS
    assert {len(question.prompt_ids) for question in unseen} == {30}
    answers = [(lookup, question) for lookup, question in asked if question.messages]
    per_round = [
        (sample.messages, temperature, lookup)
        for sample in SAMPLES
        for temperature in (0.0, 0.5)
        for lookup in (None, 1, 3)
    ]
    shown = [(question.messages, question.temperature, lookup) for lookup, question in answers]
    for index in range(ROUNDS):
        of_round = shown[index * len(per_round) : (index + 1) * len(per_round)]
        assert sorted(map(repr, of_round)) == sorted(map(repr, per_round))
        places = [item[:2] for item in of_round]
        assert list(dict.fromkeys(map(repr, places))) == list(
            dict.fromkeys(repr(item[:2]) for item in per_round)
        )
    orders = {tuple(item[2] for item in shown[at : at + 3]) for at in range(0, len(shown), 3)}
    assert len(orders) > 1
    greedy, warmer = found["temperatures"]
    assert set(greedy["speeds"]) == set(warmer["speeds"])


def test_sampled_answers_are_equal_with_drafts_too(folder: Path) -> None:
    settings = toy_settings(folder, "torch", temperatures=(0.9, 0.0), peers=("echo",), rounds=1)
    found = measured(settings)
    assert found["settings"]["temperatures"] == [0.9, 0.0]
    sampled, greedy = found["temperatures"]
    for answers in (sampled, greedy):
        for task in answers["tasks"].values():
            for name in (FIXED, ADAPTIVE):
                assert task["contenders"][name]["num_equal"] == task["num_tokens"]
    text = latency_report(found).text()
    assert "temperature 0.9, 3 prompts" in text and "greedy, 3 prompts" in text
    [ratios] = found["temperature_ratios"]
    assert (ratios["temperature"], ratios["over"]) == (0.9, 0.0)  # over the lowest
    assert set(ratios["contenders"]) == {BASELINE, FIXED, ADAPTIVE, "echo"}
    assert ratios["contenders"]["echo"]["all"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    tables = {table.name: table for table in latency_report(found).tables}
    assert next(row[:2] for row in tables["temperatures"].rows) == (FIXED, "0.9 / 0")


def test_answers_alone_leave_out_what_else_a_round_measures(folder: Path) -> None:
    found = measured(toy_settings(folder, "torch", rounds=1, answers_only=True))
    assert not {"bandwidth", "steps", "streams", "prefill"} & set(found)
    report = latency_report(found)
    assert "steps" not in [table.name for table in report.tables] + list(report.figures)
    assert "memory reads" not in report.text() and "tokens of prompt" not in report.text()
    assert found["temperatures"][0]["speeds"]["echo"]["all"]["value"] == 1.0


def test_what_is_held_against_another_run(folder: Path) -> None:
    found = report_of(folder, "torch")
    entries = {(entry["of"], entry["figure"]): entry for entry in found["compared"]}
    speed = entries["echo, echo", "tokens/s"]
    assert speed["value"] == pytest.approx(1.0) and speed["is_higher_better"]
    assert list(speed["parts"]) == [
        f"{sample}, round {n}" for n in (1, 2) for sample in ("second", "third")
    ]
    first = entries["echo, chat", "TTFT, ms"]
    assert first["value"] == pytest.approx(1000.0) and not first["is_higher_better"]
    assert entries[f"{BASELINE}, chat", "decode tokens/s"]["value"] > 0
    step = entries[f"step of 1 row, context {CONTEXTS[0]}", "step, ms"]
    assert len(step["parts"]) == ROUNDS and not step["is_higher_better"]
    assert entries[BASELINE, "peak memory, MB"]["value"] > 0


def test_an_interrupted_measurement_goes_on_with_the_next_prompt(
    folder: Path, tmp_path: Path
) -> None:
    settings, file = toy_settings(folder, "torch", peers=()), tmp_path / "latency.part.jsonl"
    places: list[Place] = []
    whole = lineup.Lineup.answers

    def stopped(self: lineup.Lineup, place: Place, *rest: Any) -> Answers:
        places.append(place)
        if len(places) == 5:
            raise KeyboardInterrupt
        return whole(self, place, *rest)

    with patch.object(lineup.Lineup, "answers", stopped):
        with pytest.raises(KeyboardInterrupt):
            measured(settings, file)
        lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        kept = {line["key"]: line["record"] for line in lines}
        with patch.object(lineup, "natural_lengths", lambda *_: pytest.fail("asked again")):
            found = measured(settings, file)
            again = measured(settings, file)
    samples = [sample.sample_id for sample in SAMPLES]
    every = [Place(number, 0.0, sample) for number in (1, 2) for sample in samples]
    assert places == [*every[:5], *every[4:]]  # what is finished is not measured again
    assert list(kept) == [
        *("lengths", "memory", "round 1, basics"),
        *("round 1, temperature 0, first", "round 1, temperature 0, second"),
        *("round 1, temperature 0, third", "round 2, basics", "round 2, temperature 0, first"),
    ]
    step = found["temperatures"][0]["tasks"]["chat"]["contenders"][BASELINE]["ttft_ms"]["p50"]
    runs = [kept[f"round {n}, temperature 0, first"]["runs"][BASELINE] for n in (1, 2)]
    assert step == round(1e3 * min(run["arrivals"][0][0] for run in runs), 3)
    assert found["memory"]["stages"] == kept["memory"]
    for part in ("steps", "temperatures", "streams", "prefill", "bandwidth", "memory"):
        assert again[part] == found[part]


def test_a_sample_that_does_not_fit_is_named_before_anything_is_measured(folder: Path) -> None:
    long = Sample("long one", "chat", ({"role": "user", "content": "x" * 600},))
    with (
        patch.object(lineup.Lineup, "answers", lambda *_: pytest.fail("measured")),
        pytest.raises(
            UsageError, match=r"sample 'long one' has 6\d\d tokens; the context holds 512"
        ),
    ):
        measured(toy_settings(folder, "torch", samples=(*SAMPLES, long)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peers": ("openvino",)}, "openvino-model"),
        ({"peers": ("echo", "echo")}, "--vs: echo is named twice"),
        ({"temperatures": (0.5, 0.5)}, "--temperature: 0.5 is named twice"),
        ({"sides": (Side("ngram", "fixed"),) * 2}, "--drafter: specdec, ngram is named twice"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: Mapping[str, Any], words: str) -> None:
    with echo_peer(), pytest.raises(UsageError, match=words):
        LatencySettings(EngineConfig(model="/nowhere"), **changes).check()


def test_sides_are_drafters_and_their_control() -> None:
    assert Side.parse("ngram@fixed").name == FIXED
    assert Side.parse("suffix@adaptive") == Side.parse("suffix") and ADAPTIVE.endswith("adaptive")
    default = EngineConfig()
    assert Side.parse(default.drafter).name == "specdec, defaults"
    assert Side.parse(f"{default.drafter}@fixed").name != "specdec, defaults"
    config = Side.parse("suffix").config(EngineConfig(control="fixed", drafter="none"))
    assert (config.drafter, config.control, config.prefix_cache) == ("suffix", "adaptive", False)
    with pytest.raises(UsageError, match="unknown drafter 'best'"):
        Side.parse("best@fixed")
    with pytest.raises(UsageError, match="plain decoding is always measured"):
        Side.parse("none")


def test_other_settings_make_another_journal(folder: Path, tmp_path: Path) -> None:
    settings, file = toy_settings(folder, "torch"), tmp_path / "part.jsonl"
    for _ in range(2):
        with Journal(file, settings.as_json()) as journal:
            journal.add("round 1", {})
    other = (Sample("first", "chat", ({"role": "user", "content": "When?"},)),)
    for changes in ({"samples": other}, {"temperatures": (0.5,)}, {"gguf": Path("x")}):
        with pytest.raises(UsageError, match="other settings"):
            Journal(file, toy_settings(folder, "torch", **changes).as_json())


def test_quick_is_smaller_in_everything_that_takes_time() -> None:
    whole = LatencySettings(EngineConfig())
    quick = whole.quick()
    assert quick.repeats < whole.repeats
    assert set(quick.rows) < set(whole.rows) and set(quick.contexts) < set(whole.contexts)


def test_the_text_has_every_section(folder: Path) -> None:
    report = latency_report(report_of(folder, "torch"))
    lines = report.text().splitlines()
    assert max(map(len, lines[lines.index("") :])) <= 120  # below what is said of the machine
    for words in (
        "memory reads",
        "floor:",
        "a step of 1 row at 20 tokens of context takes",
        "peak memory of one engine",
        "2 streams",
        "30 tokens of prompt: echo 1.000 s",
    ):
        assert words in report.text()
    tables = {table.name: table for table in (*report.tables, *report.details)}
    assert [row[0] for row in tables["breakdown"].rows] == [
        *("plan", "draft", "pack", "forward", "verify", "commit", "rest", "deliver"),
        *("step", "rows", "steps"),
    ]
    shown = [FIXED, BASELINE, ADAPTIVE, "echo", "echo:lookup, best"]
    assert [row[1] for row in tables["speeds"].rows] == shown
    assert [row[1] for row in tables["ratios"].rows] == [BASELINE, "echo", "echo:lookup, best"]
    assert len(tables["every-ratio"].rows) == 2 + 3 * 4
    assert len(tables["times"].rows) == len(tables["answers"].rows) == 2 * 6
    assert len(tables["prompts"].rows) == 3 * 7
    [answers] = report.data["temperatures"]
    no_steps = {**answers, "breakdown": {BASELINE: {}, FIXED: {}}}
    text = latency_report({**report.data, "temperatures": [no_steps]}).text()
    assert "\npart\n" in text  # of answers of one token


def test_a_peer_that_has_seen_the_prompt_is_called_unlike(folder: Path) -> None:
    data = report_of(folder, "torch")
    [answers] = data["temperatures"]
    seen = {**answers["contenders"]}
    seen["peer"] = {**seen["echo"], "num_prefix_hit": 7}
    text = latency_report({**data, "temperatures": [{**answers, "contenders": seen}]}).text()
    assert "not alike: peer found 7 prompt tokens in a cache" in text
    assert "not alike" not in latency_report(data).text()
