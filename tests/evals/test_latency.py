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
from specdec.evals.client.exchange import Arrival
from specdec.evals.data.sample import Sample
from specdec.evals.latency import bench, peak_memory
from specdec.evals.latency.contender import Run
from specdec.evals.latency.peak_memory import PeakMemory
from specdec.evals.latency.report import latency_report
from specdec.evals.latency.round import Round
from specdec.evals.latency.settings import LatencySettings
from specdec.evals.latency.side import Side
from specdec.evals.latency.summary import (
    BASELINE,
    answer_summary,
    memory_summary,
    prefill_summary,
    time_summary,
)
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


# --- arithmetic ---


def run(seconds: float, token_ids: tuple[int, ...] = (1, 2, 3, 4), *sizes: int) -> Run:
    """Steps of these sizes, equally long; of none, one token each."""
    sizes = sizes or (1,) * len(token_ids)
    times = (seconds * n / len(sizes) for n in range(1, 1 + len(sizes)))
    return Run(token_ids, seconds, tuple(map(Arrival, times, sizes)))


def test_answers_are_compared_round_by_round() -> None:
    rounds = {
        BASELINE: [[run(1.0)], [run(3.0)]],
        FIXED: [[run(0.5)], [run(1.5)]],
        "peer": [[run(2.0, (1, 2, 9, 4))], [run(6.0)]],
    }
    found = answer_summary(rounds, {})
    assert found["ratios"] == {
        f"{FIXED} / {BASELINE}": 2.0,
        f"{BASELINE} / peer": 2.0,
        f"{FIXED} / peer": 4.0,
    }
    assert found["contenders"][BASELINE]["tokens_per_second"] == round((4.0 + 4 / 3) / 2, 1)
    assert found["contenders"]["peer"]["num_equal"] == 2
    assert found["contenders"][FIXED]["num_equal"] == found["num_tokens"] == 4
    singles = [{name: both[n][0] for name, both in rounds.items()} for n in range(2)]
    prefill = prefill_summary(9, singles)
    assert prefill["ratios"][f"{BASELINE} / peer"] == 2.0  # twice as long: we are twice as fast
    assert prefill["seconds"] == {BASELINE: 2.0, FIXED: 1.0, "peer": 4.0}


def test_a_tasks_speed_is_all_its_tokens_by_all_their_seconds() -> None:
    """A long answer counts for more than a short one."""
    rounds = {BASELINE: [[run(1.0, (1,)), run(2.0, (1, 2, 3, 4, 5))]]}
    found = answer_summary(rounds, {})
    assert found["contenders"][BASELINE]["tokens_per_second"] == 2.0  # and not (1 + 2.5) / 2
    assert (found["num_tokens"], found["num_prompts"]) == (6, 2)


def test_the_best_setting_of_a_peer_is_chosen_per_task_and_named() -> None:
    rounds = {
        BASELINE: [[run(2.0)]],
        "peer:lookup=3": [[run(4.0)]],
        "peer:lookup=5": [[run(1.0)]],
    }
    found = answer_summary(rounds, {"peer:lookup": ("peer:lookup=3", "peer:lookup=5")})
    assert found["best"] == {"peer:lookup": "peer:lookup=5"}
    assert found["ratios"][f"{BASELINE} / peer:lookup"] == 0.5
    assert found["ratios"][f"{BASELINE} / peer:lookup=3"] == 2.0


def test_what_a_contender_does_not_tell_is_none() -> None:
    silent = Run(None, 2.0, (), num_told=4)
    found = answer_summary({BASELINE: [[run(1.0)]], "peer": [[silent]]}, {})
    row = found["contenders"]["peer"]
    assert row["tokens_per_second"] == 2.0
    names = ("num_equal", "tokens_per_step", "ttft_ms", "step_ms", "token_ms")
    assert [row[name] for name in (*names, "decode_tokens_per_second")] == [None] * 6


def test_times_are_of_steps_and_of_tokens() -> None:
    """Steps of 1, 2 and 1 tokens, 100 ms each: the second one's tokens have 50 ms each."""
    found = time_summary([[run(0.3, (1, 2, 3, 4), 1, 2, 1)]])
    assert found["ttft_ms"] == {"p50": 100.0, "p90": 100.0, "p99": 100.0}
    assert found["step_ms"] == {"p50": 100.0, "p90": 100.0, "p99": 100.0}
    assert found["token_ms"] == {"p50": 50.0, "p90": 100.0, "p99": 100.0}
    assert found["decode_tokens_per_second"] == 15.0  # three tokens in 200 ms


def test_memory_is_split_into_what_is_known(tmp_path: Path) -> None:
    memory, status = PeakMemory(), tmp_path / "status"
    with patch.object(peak_memory, "STATUS", status):
        for name, kib in (("start", 10), (BASELINE, 100), ("peer", 300)):
            status.write_text(f"VmPeak:\t 999 kB\nVmHWM:\t {kib} kB\n")
            memory.note(name)
    found = memory_summary(memory, {"weight_bytes": 40 * 1024, "kv_cache_bytes": 1})
    assert found["peak_bytes"] == 100 * 1024 and found["start_bytes"] == 10 * 1024
    assert found["rest_bytes"] == 50 * 1024
    assert [stage["resident_bytes"] for stage in found["stages"]] == [10240, 102400, 307200]


def test_the_high_water_mark_is_this_processs_own() -> None:
    before = peak_memory.resident_peak()
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_memory.resident_peak() >= max(before, len(block))
    assert before > 0


# --- the report ---


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_report_is_whole(folder: Path, backend: Backend) -> None:
    found = report_of(folder, backend)
    json.dumps(found, allow_nan=False)
    assert found["target"]["backend"] == backend and found["target"]["weights"] == "fp32"
    assert found["target"]["threads"] == 1
    sizes = [(cell["context"], cell["rows"]) for cell in found["steps"]]
    assert sizes == [(context, rows) for context in CONTEXTS for rows in ROWS]
    for cell in found["steps"]:
        assert cell["num_steps"] == ROUNDS * REPEATS
        assert cell["step_ms"]["p50"] >= cell["forward_ms"]["p50"] > 0
        assert cell["step_per_floor"] >= cell["step_per_floor_with_kv"] > 0
    assert len(found["bandwidth"]["rounds"]) == found["settings"]["rounds"] == ROUNDS
    assert found["streams"]["num_streams"] == 2
    assert set(found["breakdown"]) == {BASELINE, FIXED, ADAPTIVE}
    assert found["breakdown"][BASELINE]["rows"] == 1.0
    # The first token comes with the prompt; what warmed up is not counted.
    num_tokens = sum(summary["num_tokens"] for summary in found["prompts"].values())
    num_decoded = num_tokens - len(SAMPLES)
    assert found["breakdown"][BASELINE]["steps"] == ROUNDS * num_decoded
    assert list(found["prompts"]) == ["chat", "echo"]
    assert [found["prompts"][task]["num_prompts"] for task in ("chat", "echo")] == [1, 2]
    for summary in found["prompts"].values():
        settings = ["echo:lookup=1", "echo:lookup=3"]
        assert list(summary["contenders"]) == [BASELINE, FIXED, ADAPTIVE, "echo", *settings]
        for name in (FIXED, ADAPTIVE):
            assert summary["contenders"][name]["num_equal"] == summary["num_tokens"] <= 16
        assert summary["contenders"]["echo"]["tokens_per_second"] == 1.0
        assert summary["contenders"]["echo"]["ttft_ms"]["p99"] == 1000.0
        assert summary["best"] == {"echo:lookup": "echo:lookup=3"}
        assert len(summary["ratios"]) == 2 + 3 * 4
    assert found["prefill"]["num_tokens"] == 30
    assert found["prefill"]["seconds"]["echo"] == 1.0
    stages = [stage["after"] for stage in found["memory"]["stages"]]
    own = ["start", BASELINE, FIXED, ADAPTIVE, "what measures"]
    assert stages == [*own, "echo", "echo:lookup", "all"]
    assert found["memory"]["kv_cache_bytes"] == 8 * 2**20


def test_everybody_is_asked_the_same_in_turn(folder: Path) -> None:
    """Three prompts, then a prompt nobody has seen; once when loaded, once to warm up, then ROUNDS
    times."""
    settings = toy_settings(folder, "torch")
    with echo_peer() as peer, Journal(None, {}) as journal:
        bench.measure(settings, settings.check(), journal)
    turns = [None, 1, 3]
    assert [lookup for lookup, _ in peer.asked] == turns + (1 + ROUNDS) * (3 * turns + [None])
    questions = [question for lookup, question in peer.asked if lookup is None]
    first, rounds = questions[0], [questions[1 + 4 * n : 5 + 4 * n] for n in range(1 + ROUNDS)]
    assert all(found[:3] == rounds[0][:3] for found in rounds) and rounds[0][0] == first
    assert [question.messages for question in rounds[0][:3]] == [s.messages for s in SAMPLES]
    unseen = {found[3].prompt_ids for found in rounds}
    assert len(unseen) == 1 + ROUNDS and {len(ids) for ids in unseen} == {30}
    assert all(found[3].num_tokens == 1 for found in rounds)


def test_sampled_answers_are_equal_with_drafts_too(folder: Path) -> None:
    greedy = report_of(folder, "torch")
    settings = toy_settings(folder, "torch", temperature=0.9, peers=(), rounds=1)
    found = measured(settings)
    assert found["settings"]["temperature"] == 0.9
    for summary in found["prompts"].values():
        for name in (FIXED, ADAPTIVE):
            assert summary["contenders"][name]["num_equal"] == summary["num_tokens"]
    assert "temperature 0.9, 3 prompts" in latency_report(found).text()
    assert "greedy, 3 prompts" in latency_report(greedy).text()


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


def test_an_interrupted_measurement_goes_on(folder: Path, tmp_path: Path) -> None:
    settings, file = toy_settings(folder, "torch", peers=()), tmp_path / "latency.part.jsonl"
    rounds: list[int] = []
    whole = bench.LatencyBench.round

    def stopped(self: bench.LatencyBench, index: int, *rest: Any, **more: Any) -> Round:
        rounds.append(index)
        if index == ROUNDS and rounds.count(index) == 1:
            raise KeyboardInterrupt
        return whole(self, index, *rest, **more)

    with patch.object(bench.LatencyBench, "round", stopped):
        with pytest.raises(KeyboardInterrupt):
            measured(settings, file)
        kept = json.loads(file.read_text().splitlines()[1])["record"]
        found = measured(settings, file)
        again = measured(settings, file)
    assert rounds == [0, 1, 2, 0, 2]  # what is finished is not measured again
    speeds = found["prompts"]["chat"]["contenders"][BASELINE]["seconds"]
    assert speeds[0] == round(kept["answers"]["first"][BASELINE]["total_s"], 5)
    for part in ("steps", "prompts", "breakdown", "streams", "prefill", "bandwidth"):
        assert again[part] == found[part]


def test_a_sample_that_does_not_fit_is_named_before_anything_is_measured(folder: Path) -> None:
    long = Sample("long one", "chat", ({"role": "user", "content": "x" * 600},))
    with (
        patch.object(bench.LatencyBench, "round", lambda *_, **__: pytest.fail("measured")),
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
        ({"sides": (Side("ngram", "fixed"),) * 2}, "--drafter: specdec, ngram is named twice"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: Mapping[str, Any], words: str) -> None:
    with echo_peer(), pytest.raises(UsageError, match=words):
        LatencySettings(EngineConfig(model="/nowhere"), **changes).check()


def test_sides_are_drafters_and_their_control() -> None:
    assert Side.parse("ngram@fixed").name == FIXED
    assert Side.parse("suffix@adaptive") == Side.parse("suffix") and ADAPTIVE.endswith("adaptive")
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
    for changes in ({"samples": other}, {"temperature": 0.5}, {"gguf": Path("x")}):
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
    tables = {table.name: table for table in report.tables}
    assert [row[0] for row in tables["breakdown"].rows] == [
        *("plan", "draft", "pack", "forward", "verify", "commit", "rest", "deliver"),
        *("step", "rows", "steps"),
    ]
    ratios = {row[:2]: row[2:] for row in tables["ratios"].rows}
    assert ratios["chat", BASELINE][0] is None  # against itself
    best = ratios["chat", "echo:lookup, best: 3"]
    assert best == ratios["chat", "echo:lookup=3"] and None not in best
    assert len(tables["times"].rows) == len(tables["answers"].rows) == 2 * 6
    no_steps = {**report.data, "breakdown": {BASELINE: {}, FIXED: {}}}
    assert "\npart\n" in latency_report(no_steps).text()  # of answers of one token


def test_a_peer_that_has_seen_the_prompt_is_called_unlike(folder: Path) -> None:
    data = report_of(folder, "torch")
    seen = {**data["contenders"], "peer": {**data["contenders"]["echo"], "num_prefix_hit": 7}}
    text = latency_report({**data, "contenders": seen}).text()
    assert "not alike: peer found 7 prompt tokens in a cache" in text
    assert "not alike" not in latency_report(data).text()
