"""Speeds and ratios of answers, prompt by prompt, and the prompts themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.evals.client.exchange import Arrival
from specdec.evals.data.sample import Sample
from specdec.evals.latency import peak_memory
from specdec.evals.latency.answer_summary import BASELINE, AnswerSummary, time_summary
from specdec.evals.latency.answers import Answers, Place
from specdec.evals.latency.asked import Asked, warm_up
from specdec.evals.latency.contender import Question, Run
from specdec.evals.latency.markdown import markdown, short_markdown
from specdec.evals.latency.peak_memory import PeakMemory
from specdec.evals.latency.prompts import PROMPTS, QUICK_PROMPTS, TASKS
from specdec.evals.latency.ratios import by_task, geometric_mean
from specdec.evals.latency.step_clock import PARTS, StepTime
from specdec.evals.latency.summary import memory_summary, prefill_summary

OURS = "specdec, defaults"
STEP = StepTime(1.0, dict.fromkeys(PARTS, 0.1), 0.0, 1, True)
Seconds = Mapping[str, Sequence[Sequence[float]]]  # by contender, round and prompt


def summary(
    seconds: Seconds,
    tasks: Sequence[str],
    best_of: Mapping[str, Sequence[str]] | None = None,
    temperature: float = 0.0,
) -> AnswerSummary:
    """Answers of four tokens, one second after the first of which the last one comes."""
    asked = [
        Asked(Sample(f"s{index}", task), Question((1,), 4, temperature))
        for index, task in enumerate(tasks)
    ]
    answers = {}
    for number in range(len(next(iter(seconds.values())))):
        for index in range(len(tasks)):
            runs = {}
            for name, rounds in seconds.items():
                total = rounds[number][index]
                times = [total - 0.5 + 0.5 * n / 3 for n in range(4)]
                runs[name] = Run((1, 2, 3, 4), total, tuple(Arrival(at, 1) for at in times))
            answers[Place(number + 1, temperature, f"s{index}")] = Answers(
                runs, dict.fromkeys(runs, (STEP,))
            )
    return AnswerSummary(asked, answers, best_of or {})


def test_ratios_are_of_prompts_then_medians_of_tasks_and_a_geometric_mean() -> None:
    """Ours takes 1 s everywhere; the peer 2 s and 4 s in one task, 16 s in the other."""
    seconds = {BASELINE: [[1.0, 1.0, 1.0]] * 2, "peer": [[2.0, 4.0, 16.0]] * 2}
    found = summary(seconds, ["a", "a", "b"]).as_json()
    ratio = found["ratios"][f"{BASELINE} / peer"]
    assert ratio["tasks"] == {"a": 3.0, "b": 16.0}
    assert ratio["all"]["value"] == pytest.approx((2 * 4 * 16) ** (1 / 3), abs=1e-3)
    assert found["speeds"]["peer"]["tasks"] == {"a": 1.5, "b": 0.25}
    row = found["tasks"]["a"]["contenders"]["peer"]
    assert (row["tokens_per_second"], row["min"], row["max"]) == (1.5, 1.0, 2.0)
    assert found["prompts"]["s2"]["tokens_per_second"] == {BASELINE: 4.0, "peer": 0.2}
    assert (found["tasks"]["a"]["num_tokens"], found["tasks"]["a"]["mean_tokens"]) == (8, 4)


def test_what_drifts_between_rounds_cancels() -> None:
    """Both are ten times as slow in the second round, and in the third the peer alone."""
    seconds = {BASELINE: [[1.0], [10.0], [1.0]], "peer": [[2.0], [20.0], [20.0]]}
    found = summary(seconds, ["a"]).as_json()
    assert found["ratios"][f"{BASELINE} / peer"]["tasks"] == {"a": 2.0}


def test_the_best_setting_of_a_peer_is_chosen_prompt_by_prompt() -> None:
    seconds = {
        BASELINE: [[1.0, 1.0]],
        "peer:lookup=3": [[4.0, 2.0]],
        "peer:lookup=5": [[3.0, 8.0]],
    }
    best_of = {"peer:lookup": ("peer:lookup=3", "peer:lookup=5"), "gone": ("gone=1", "gone=2")}
    found = summary(seconds, ["a", "b"], best_of).as_json()
    assert found["prompts"]["s0"]["best"] == {"peer:lookup": "peer:lookup=5"}
    assert found["prompts"]["s1"]["best"] == {"peer:lookup": "peer:lookup=3"}
    assert found["ratios"][f"{BASELINE} / peer:lookup"]["tasks"] == {"a": 3.0, "b": 2.0}
    assert "gone" not in found["speeds"]  # of whose settings none ran


def test_a_temperature_is_held_against_the_same_contender() -> None:
    """Twice as long end to end, and no slower once the first token is there."""
    cold = summary({BASELINE: [[1.0, 2.0]], "greedy": [[1.0, 1.0]]}, ["a", "b"])
    warm = summary({BASELINE: [[2.0, 4.0]]}, ["a", "b"], temperature=0.8)
    found = warm.over(cold)
    assert (found["temperature"], found["over"]) == (0.8, 0.0)
    assert list(found["contenders"]) == [BASELINE]
    ratio = found["contenders"][BASELINE]
    assert ratio["tasks"] == {"a": 0.5, "b": 0.5} and ratio["all"]["value"] == 0.5
    assert ratio["decode"]["value"] == 1.0


def test_what_a_contender_does_not_tell_is_none() -> None:
    found = summary({BASELINE: [[1.0]], "silent": [[2.0]]}, ["a"])
    silent = Run(None, 2.0, (), num_told=4)
    place = Place(1, 0.0, "s0")
    runs = {BASELINE: found.runs[BASELINE][0][0], "silent": silent}
    again = AnswerSummary(
        [Asked(Sample("s0", "a"), Question((1,), 4))],
        {place: Answers(runs, {BASELINE: (STEP,)})},
        {},
    )
    row = again.as_json()["tasks"]["a"]["contenders"]["silent"]
    assert row["tokens_per_second"] == 2.0
    names = ("num_equal", "tokens_per_step", "ttft_ms", "step_ms", "token_ms")
    assert [row[name] for name in (*names, "decode_tokens_per_second")] == [None] * 6
    assert again.over(again)["contenders"]["silent"]["decode"] is None


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_a_geometric_mean_is_the_root_of_a_product(values: list[float]) -> None:
    found = geometric_mean(values)
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    assert found.value == pytest.approx(product)
    turned = geometric_mean([1 / value for value in values])
    assert turned.value == pytest.approx(1 / product)
    if found.low is not None and found.high is not None and turned.low and turned.high:
        assert found.low <= found.value * (1 + 1e-9) and found.value <= found.high * (1 + 1e-9)
        assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low))
    assert by_task(values, ["x"] * len(values))["x"] in values or len(values) % 2 == 0


def test_answers_come_back_from_a_journal() -> None:
    step = StepTime(1.0, dict.fromkeys(PARTS, 0.1), 0.25, 3, True)
    answers = Answers({"a": Run((1,), 1.0, (Arrival(1.0, 1),))}, {"a": [step]})
    assert Answers.from_json(json.loads(json.dumps(answers.as_json()))) == answers
    assert Place(2, 0.8, "x: y").key == "round 2, temperature 0.8, x: y"


def test_the_longest_prompt_of_each_temperature_warms_up() -> None:
    def asked(prompt: int, answer: int, temperature: float) -> Asked:
        return Asked(Sample("s", "t"), Question((1,) * prompt, answer, temperature))

    found = warm_up([asked(3, 9, 0.0), asked(5, 99, 0.0), asked(4, 2, 0.8), asked(1, 50, 0.8)])
    assert [(len(q.prompt_ids), q.num_tokens, q.temperature) for q in found] == [
        *((5, 32, 0.0), (4, 2, 0.8))
    ]


# --- times, memory and prompts that are read ---


def run(seconds: float, token_ids: tuple[int, ...] = (1, 2, 3, 4), *sizes: int) -> Run:
    """Steps of these sizes, equally long; of none, one token each."""
    sizes = sizes or (1,) * len(token_ids)
    times = (seconds * n / len(sizes) for n in range(1, 1 + len(sizes)))
    return Run(token_ids, seconds, tuple(map(Arrival, times, sizes)))


def test_a_prompt_that_is_read_twice_as_fast_has_twice_the_speed() -> None:
    rounds = [{BASELINE: run(1.0), "peer": run(2.0)}, {BASELINE: run(3.0), "peer": run(6.0)}]
    prefill = prefill_summary(9, rounds)
    assert prefill["ratios"] == {f"{BASELINE} / peer": 2.0}
    assert prefill["seconds"] == {BASELINE: 2.0, "peer": 4.0}


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


# --- the tables of README and docs ---


def report() -> dict[str, Any]:
    """Two temperatures; the peer's lookup answers at the first one only."""
    best_of = {"peer:lookup": ("peer:lookup=1", "peer:lookup=2")}
    seconds = {BASELINE: [[0.4]], OURS: [[0.2]], "peer:lookup=1": [[4.0]], "peer:lookup=2": [[0.5]]}
    cold = summary(seconds, ["chat"], best_of)
    warm = summary({BASELINE: [[0.4]], OURS: [[0.25]]}, ["chat"], best_of, 0.8)
    return {
        "settings": {"ours": OURS, "best_of": best_of},
        "temperatures": [cold.as_json(), warm.as_json()],
    }


def test_the_table_of_docs_has_speeds_and_how_many_times_that_ours_is() -> None:
    assert markdown(report()).splitlines() == [
        "| tokens/s, greedy | chat | all | ours is |",
        "| --- | --- | --- | --- |",
        "| **specdec, defaults** | 20 | 20 |  |",
        "| specdec, no drafts | 10 (2.00x) | 10 | 2.00x |",
        "| peer:lookup, best | 8 (2.50x) | 8 | 2.50x |",
        "",
        "| tokens/s, temperature 0.8 | chat | all | ours is |",
        "| --- | --- | --- | --- |",
        "| **specdec, defaults** | 16 | 16 |  |",
        "| specdec, no drafts | 10 (1.60x) | 10 | 1.60x |",
    ]


def test_the_table_of_readme_has_all_prompts_at_each_temperature() -> None:
    assert short_markdown(report()).splitlines() == [
        "| one stream | tokens/s, greedy | ours is | tokens/s, temperature 0.8 | ours is |",
        "| --- | --- | --- | --- | --- |",
        "| **specdec, defaults** | 20 |  | 16 |  |",
        "| specdec, no drafts | 10 | 2.00x | 10 | 1.60x |",
        "| peer:lookup, best | 8 | 2.50x | - |  |",
    ]


# --- the prompts ---


def test_there_are_five_prompts_of_each_of_six_tasks() -> None:
    assert [prompt.task for prompt in PROMPTS] == [task for task in TASKS for _ in range(5)]
    assert len(TASKS) == 6
    assert len({prompt.sample_id for prompt in PROMPTS}) == 30
    texts = [str(prompt.messages[0]["content"]) for prompt in PROMPTS]
    assert len(set(texts)) == 30 and all(text == text.strip() for text in texts)
    assert [prompt.task for prompt in QUICK_PROMPTS] == ["chat", "code edit"]
    assert all(prompt in PROMPTS for prompt in QUICK_PROMPTS)


@pytest.mark.parametrize("task", ["code edit", "extraction", "summary"])
def test_who_works_on_a_text_brings_it(task: str) -> None:
    """Of 60 to 500 words, and not all equally long."""
    texts = [str(p.messages[0]["content"]) for p in PROMPTS if p.task == task]
    lengths = [len(re.findall(r"\w+", text)) for text in texts]
    assert min(lengths) >= 60 and 1.3 * min(lengths) < max(lengths) <= 500
