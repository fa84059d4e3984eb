"""What is counted of steps, against loops that count one by one, and the figures made of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.evals.acceptance.answer import Answer, Measured
from specdec.evals.acceptance.figures import (
    FEWEST,
    decode_speedup,
    end_to_end_speedup,
    figures,
    interval_of,
    pairs_of,
    parts_of,
    token_weighted,
)
from specdec.evals.acceptance.step_counts import StepCounts, at
from specdec.metrics import SpeculationStats
from specdec.step_record import StepRecord
from tests.evals.acceptance_case import answer, counts, steps

REASONS = st.sampled_from(["stop", "length"])


def verified_by(records: Sequence[StepRecord]) -> dict[str, int]:
    """More than were evaluated: nodes behind a rejected one are verified too."""
    found: Counter[str] = Counter()
    for record in records:
        found.update({name: number + 1 for name, number in record.evaluated_by.items()})
    return dict(found)


def number_at(counts: Sequence[int], position: int) -> int:
    return counts[position - 1] if position <= len(counts) else 0


@given(records=steps() | steps(is_last_cut=True), reason=REASONS)
def test_counts_are_those_of_a_loop_over_steps(records: list[StepRecord], reason: str) -> None:
    found = StepCounts.of(records, reason, verified_by(records))
    for position in range(1, 10):
        expected = {
            "offered": sum(number_at(record.offered, position) for record in records),
            "verified": sum(number_at(record.verified, position) for record in records),
            "evaluated": sum(record.num_evaluated >= position for record in records),
            "accepted": sum(record.num_accepted >= position for record in records),
            "cut": sum(
                record.num_accepted < position <= record.num_accepted + record.num_cut
                for record in records
            ),
        }
        index = position - 1
        for name in ("offered", "verified", "evaluated", "accepted"):
            assert at(getattr(found, name), index) == expected[name], (name, position)
        cut, other = found.cut_by_stop, found.cut_by_length
        if reason == "length":
            cut, other = other, cut
        assert at(cut, index) == expected["cut"] and at(other, index) == 0
        assert expected["verified"] >= expected["evaluated"] >= expected["accepted"]
        assert expected["evaluated"] >= expected["accepted"] + expected["cut"]
    assert found.num_steps == sum(found.histogram) == len(records)
    assert found.num_accepted == sum(n * steps for n, steps in enumerate(found.histogram))
    assert found.num_accepted == sum(found.accepted)
    assert found.num_zero_draft == sum(not record.verified for record in records)
    assert found.num_verified == sum(sum(record.verified) for record in records)
    num_bonus = sum(record.num_tokens - record.num_accepted for record in records)
    assert sum(record.num_tokens for record in records) == found.num_accepted + num_bonus
    for name, source in found.sources.items():
        assert source.evaluated == sum(record.evaluated_by.get(name, 0) for record in records)
        assert source.accepted == sum(record.accepted_by.get(name, 0) for record in records)


@given(parts=st.lists(steps(), min_size=1, max_size=4), reason=REASONS)
def test_a_total_is_what_all_steps_together_count(
    parts: list[list[StepRecord]], reason: str
) -> None:
    total = StepCounts.total(
        StepCounts.of(records, reason, verified_by(records)) for records in parts
    )
    together = [record for records in parts for record in records]
    assert total == StepCounts.of(together, reason, verified_by(together))


@given(records=steps(is_last_cut=True), reason=REASONS)
def test_records_survive_the_journal(records: list[StepRecord], reason: str) -> None:
    found = StepCounts.of(records, reason, verified_by(records))
    record = answer("s", "suffix", [1], 1.0, counts=found)
    assert Answer.from_json(json.loads(json.dumps(record.as_json()))) == record
    without = replace(record, is_equal=None, measured=replace(record.measured, counts=None))
    assert Answer.from_json(json.loads(json.dumps(without.as_json()))) == without


def test_what_a_server_does_not_tell_is_not_counted() -> None:
    stats = SpeculationStats()
    for accepted in (2, 0, 1):
        stats.observe_step([("a",)] * 3, [("a",)] * accepted)
    told = StepCounts.of_server(stats)
    assert told.histogram == (1, 1, 1) and told.accepted == (2, 1)
    assert told.num_steps == 3 and told.num_verified == 9 and told.num_accepted == 3
    assert told.num_zero_draft is None and told.evaluated is None and told.verified is None
    assert told.sources["a"].verified == 9 and told.sources["a"].evaluated is None
    both = StepCounts.total([told, counts([1])])
    assert both.evaluated is None and both.num_zero_draft is None
    assert both.histogram == (1, 2, 1) and both.sources["a"].evaluated is None


def test_long_answers_weigh_more_only_where_tokens_are_weighted() -> None:
    answers = [answer("a", "suffix", [3, 1, 0, 0], 1.0), answer("b", "suffix", [4], 1.0)]
    found = figures(pairs_of(answers, "suffix", None), has_intervals=True)
    assert found["tokens_per_step"]["token_weighted"]["value"] == 1 + 8 / 5
    assert found["tokens_per_step"]["request_mean"]["value"] == (2 + 5) / 2
    assert found["accepted_per_step"] == 8 / 5 and found["drafted_per_step"] == 4
    assert found["acceptance_rate"] == 8 / 20
    assert found["accepted_lengths"] == [2, 1, 0, 1, 1]
    assert found["draft_ms_per_step"] == pytest.approx(100)
    assert found["step_ms"] == pytest.approx(2000 / 3), "first steps are a part of the prefill"
    assert found["decode_speedup"] is None, "there is no plain decoding"


def test_rates_by_position_have_their_own_denominators() -> None:
    answers = [answer("a", "suffix", [2, 0, 1, 1], 1.0, drafted=2)]
    rows = figures(pairs_of(answers, "suffix", None), has_intervals=True)["positions"]
    assert [row["accepted"] for row in rows] == [3, 1]
    assert [row["evaluated"] for row in rows] == [4, 3]
    assert [row["accepted_per_step"]["value"] for row in rows] == [3 / 4, 1 / 4]
    assert [row["accepted_per_evaluated"]["value"] for row in rows] == [3 / 4, 1 / 3]


def test_positions_end_with_what_was_verified_and_bounds_need_who_judged() -> None:
    """A depth that was offered and never verified says nothing; nine samples have no bounds."""
    offered = StepRecord((1, 1, 1), (1, 1), 1, 0, 0, 1, {"a": 1}, {})
    accepted = StepRecord((1, 1), (1, 1), 2, 1, 0, 2, {"a": 2}, {"a": 1})
    judged = [
        replace(answer(f"j{n}", "suffix", [1], 1.0), measured=measured_of(accepted))
        for n in range(9)
    ]
    others = [
        replace(answer(f"o{n}", "suffix", [0], 1.0), measured=measured_of(offered))
        for n in range(9)
    ]
    rows = figures(pairs_of([*judged, *others], "suffix", None), has_intervals=True)["positions"]
    assert [row["position"] for row in rows] == [1, 2]
    assert rows[0]["accepted_per_evaluated"]["low"] is not None
    assert (
        0
        <= rows[0]["accepted_per_evaluated"]["low"]
        <= rows[0]["accepted_per_evaluated"]["high"]
        <= 1
    )
    assert rows[1]["accepted_per_evaluated"] == {"value": 0.0, "low": None, "high": None}


def measured_of(record: StepRecord) -> Measured:
    found = answer("x", "suffix", [1], 1.0).measured
    return replace(found, counts=StepCounts.of([record], "length", {"a": 2}))


def test_speed_is_time_per_token_and_the_prompt_is_apart() -> None:
    """Plain: 10 tokens in 9 s. The drafter: 5 with the first step, the other 5 in 2.5 s."""
    plain = answer("a", "none", [0] * 10, 9.0, drafted=0)
    drafted = answer("a", "suffix", [4, 4], 2.5, prefill_s=2.0)
    (pair,) = pairs_of([plain, drafted], "suffix", "none")
    assert decode_speedup(pair) == (9.0, 2.5 / 5 * 9)
    assert end_to_end_speedup(pair) == (10.0, 4.5)
    found = figures([pair], has_intervals=False)
    assert found["decode_speedup"]["value"] == 2.0
    assert found["end_to_end_speedup"]["value"] == pytest.approx(10 / 4.5)
    assert found["prefill_ms"] == 2000 and found["decode_ms_per_token"] == 500


def test_an_answer_of_one_step_has_no_decode_speed() -> None:
    plain = [answer("a", "none", [0] * 5, 4.0, drafted=0), answer("b", "none", [0] * 3, 2.0)]
    drafted = [answer("a", "suffix", [4], 0.0), answer("b", "suffix", [0, 0, 0], 1.0)]
    pairs = pairs_of([*plain, *drafted], "suffix", "none")
    assert decode_speedup(pairs[0]) is None
    assert figures(pairs, has_intervals=False)["decode_speedup"]["value"] == 2.0
    unknown = replace(drafted[1], measured=replace(drafted[1].measured, num_first=None))
    (pair,) = pairs_of([*plain, unknown], "suffix", "none")
    assert decode_speedup(pair) is None, "a server that does not count as it goes"


def test_turns_of_a_sample_are_drawn_together() -> None:
    answers = [
        replace(answer(f"s{number}", "suffix", [number % 3] * 4, 1.0), turn=turn)
        for number in range(FEWEST)
        for turn in range(2)
    ]
    parts = parts_of(pairs_of(answers, "suffix", None), token_weighted)
    assert len(parts) == FEWEST and parts["s1"] == (16.0, 8.0)
    whole = interval_of(parts)
    assert whole is not None and whole.low is not None
    halved = interval_of({name: (a / 2, b / 2) for name, (a, b) in parts.items()})
    assert halved is not None and halved.low == pytest.approx(whole.low), "as sure as of one turn"
    few = interval_of({str(number): (number + 2, 1) for number in range(FEWEST - 1)})
    assert few is not None and few.low is None
