"""`specdec eval acceptance`: its questions, edited predictions, arithmetic, and a toy report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.evals.acceptance import bench as acceptance
from specdec.evals.acceptance.bench import AcceptanceSettings, Tally, evaluate, render
from specdec.evals.acceptance.edited import NUM_EDITS, SHARE, with_edits
from specdec.evals.data.questions import code_edits
from specdec.evals.data.sample import Sample
from specdec.generation import Generation
from specdec.metrics import SpeculationStats
from specdec.request import TokenRecord
from tests.evals.toy_folder import load_or_skip, toy_config, write_toy


def test_code_edits_hold_whole_functions() -> None:
    found = code_edits(6)
    texts = [sample.messages[0]["content"] for sample in found]
    assert len(found) == len(set(texts)) == len({sample.sample_id for sample in found}) == 6
    assert all(text.count("```") == 2 and "def " in text for text in texts)


@given(token_ids=st.lists(st.integers(0, 9), min_size=3, max_size=400), seed=st.integers(0, 1000))
def test_three_spans_differ(token_ids: list[int], seed: int) -> None:
    """Other tokens are of another alphabet, so what was put in can be told from what was there."""
    edited = with_edits(token_ids, seed, 10)
    length = max(1, round(SHARE * len(token_ids) / NUM_EDITS))
    assert len(edited) == len(token_ids)  # one span put in, one left out
    marked = with_edits(range(len(token_ids)), seed, 1)  # all wrong tokens are 0
    kept = [token for token in marked if token]
    assert kept == sorted(set(kept))  # in order
    num_missing = len(token_ids) - 1 - len(kept)
    # The spans left out and replaced; token 0 itself may be in one of them.
    assert 2 * length - 1 <= num_missing <= 2 * length


def answer(accepted: list[int], tokens: int, seconds: float) -> Generation:
    stats = SpeculationStats()
    for count in accepted:
        stats.observe_step([("a",)] * 4, [("a",)] * count)
    return Generation(
        text="",
        tokens=tuple(TokenRecord(0, ("target",), 1, 0) for _ in range(tokens)),
        finish_reason="length",
        num_prompt_tokens=1,
        num_prefix_hit=0,
        stats=stats,
        seed=0,
        ttft_s=1.0,
        total_s=1.0 + seconds,
        num_first=1,
    )


def test_a_tally_is_the_sum_of_its_answers() -> None:
    plain, drafted = Tally(), Tally()
    plain.add(answer([0] * 10, tokens=11, seconds=2.0), 0.0, is_equal=True)  # 5 tokens/s
    drafted.add(answer([3, 1], tokens=6, seconds=0.5), 0.1, is_equal=True)
    drafted.add(answer([0, 4], tokens=6, seconds=0.5), 0.3, is_equal=False)  # 10 tokens/s
    found = drafted.as_json(plain)
    assert found["tokens_per_step"] == 1 + 8 / 4
    assert found["drafted_per_step"] == 4 and found["answers"] == 2 and found["tokens"] == 12
    assert found["draft_ms_per_step"] == pytest.approx(100) and found["step_ms"] == 250
    assert found["speed"] == 2.0 and found["unequal_answers"] == 1
    assert found["accepted_by_source"] == {"a": 8}
    total = Tally()
    total.merge(drafted)
    total.merge(drafted)
    assert total.as_json(plain)["tokens"] == 24 and total.as_json(plain)["speed"] == 2.0


def settings_for(folder: Path) -> AcceptanceSettings:
    config = toy_config(folder, "native")
    load_or_skip(config)
    asked = (("chat", "the cat"), ("qa", "who"), ("chat", "aaaa"))
    samples = [
        Sample(str(number), task, ({"role": "user", "content": text},))
        for number, (task, text) in enumerate(asked)
    ]
    config = replace(config, node_budget=8)
    return AcceptanceSettings(config, samples, ("ngram", "prediction,suffix"), max_tokens=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("acceptance") / "model")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_toy_report(folder: Path, temperature: float) -> None:
    report = evaluate(replace(settings_for(folder), temperature=temperature))
    drafters = report["drafters"]
    assert list(drafters) == ["none", "ngram", "prediction,suffix"]
    for found in drafters.values():
        assert list(found["tasks"]) == ["chat", "qa"]
        assert found["all"]["answers"] == 3 and found["all"]["unequal_answers"] == 0
    assert drafters["none"]["all"]["tokens_per_step"] == 1 and drafters["none"]["all"]["speed"] == 1
    predicted = drafters["prediction,suffix"]["all"]
    assert predicted["tokens_per_step"] > 2  # nearly the answer itself was predicted
    assert predicted["accepted_by_source"]["prediction"] > 0
    text = render(report)
    assert "chat" in text and "prediction,suffix" in text and "DIFFER" not in text


def test_an_unequal_answer_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_for(folder)
    number = 0

    def other(*args: object) -> Generation:
        nonlocal number
        number += 1
        return answer([0] * 3, tokens=3 + number % 2, seconds=0.1)

    monkeypatch.setattr(acceptance, "_answer", other)
    monkeypatch.setattr(acceptance, "with_edits", lambda *_: ())
    report = evaluate(settings)
    assert report["drafters"]["ngram"]["all"]["unequal_answers"] == 3
    assert "DIFFER" in render(report)
