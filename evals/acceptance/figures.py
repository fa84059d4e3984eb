"""Figures: what the answers of one setting come to, over a task or over all, with intervals.

Requests of one sample resemble each other, so intervals draw whole samples again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.evals.acceptance.answer import Answer, Measured
from specdec.evals.acceptance.step_counts import StepCounts, at
from specdec.evals.report.intervals import Interval, ratio_interval


@dataclass(frozen=True)
class Pair:
    """An answer and the plain one to the same prompt; None where there is none."""

    answer: Answer
    plain: Answer | None

    @property
    def measured(self) -> Measured:
        return self.answer.measured

    @property
    def plain_measured(self) -> Measured | None:
        return None if self.plain is None else self.plain.measured


FEWEST = 10  # samples that bounds are given of: of fewer they are true and say nothing
Part = tuple[float, float]
Parts = Mapping[str, Part]  # numerator and denominator by sample id
PartOf = Callable[[Pair], Part | None]


def pairs_of(answers: Sequence[Answer], setting: str, plain: str | None) -> list[Pair]:
    """The answers of a setting, each with the one of plain decoding at its temperature."""
    base = {(item.sample_id, item.turn): item for item in answers if item.setting == plain}
    return [
        Pair(item, base.get((item.sample_id, item.turn)))
        for item in answers
        if item.setting == setting
    ]


def by_task(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """The answers of each task, in the order in which tasks come."""
    tasks: dict[str, list[Pair]] = {}
    for pair in pairs:
        tasks.setdefault(pair.answer.task, []).append(pair)
    return tasks


def parts_of(pairs: Sequence[Pair], part_of: PartOf) -> dict[str, Part]:
    """Sums by sample of what each answer contributes; answers that contribute nothing are out."""
    sums: dict[str, Part] = {}
    for pair in pairs:
        part = part_of(pair)
        if part is not None:
            above, below = sums.get(pair.answer.sample_id, (0.0, 0.0))
            sums[pair.answer.sample_id] = (above + part[0], below + part[1])
    return sums


def interval_of(parts: Parts) -> Interval | None:
    """The ratio of the sums, and its interval over samples; no bounds of fewer than FEWEST."""
    found = ratio_interval(
        [part[0] for part in parts.values()], [part[1] for part in parts.values()]
    )
    return Interval(found.value) if found and len(parts) < FEWEST else found


def token_weighted(pair: Pair) -> Part | None:
    """Tokens per step: accepted length + 1 over all steps."""
    counts = pair.measured.counts
    return (counts.num_steps + counts.num_accepted, counts.num_steps) if counts else None


def request_mean(pair: Pair) -> Part | None:
    """Tokens per step: the mean over answers, long ones and short ones alike."""
    counts = pair.measured.counts
    return (1 + counts.num_accepted / counts.num_steps, 1) if counts and counts.num_steps else None


def decode_speedup(pair: Pair) -> Part | None:
    """Plain decoding's seconds after its first token, over the setting's for as many tokens.

    A setting whose first step brought several tokens has fewer left; its time per token counts.
    Answers that were over with the first step have no such time and are out on both sides.
    """
    plain, own = pair.plain_measured, pair.measured
    if plain is None or not plain.num_timed or not own.num_timed:
        return None
    return plain.decode_s, own.decode_s / own.num_timed * plain.num_timed


def end_to_end_speedup(pair: Pair) -> Part | None:
    """Plain decoding's seconds over the setting's for as many tokens, the prompt included."""
    plain, own = pair.plain_measured, pair.measured
    if plain is None or not own.num_output:
        return None
    return plain.total_s, own.total_s / own.num_output * plain.num_output


def figures(pairs: Sequence[Pair], *, has_intervals: bool) -> dict[str, Any]:
    """All figures of a setting, ready for JSON; without intervals positions have rates alone."""
    counted = [pair.measured.counts for pair in pairs if pair.measured.counts is not None]
    counts = StepCounts.total(counted) if counted else None
    return {
        "answers": len(pairs),
        "output_tokens": sum(pair.measured.num_output for pair in pairs),
        "tokens_per_step": {
            "token_weighted": _json(interval_of(parts_of(pairs, token_weighted))),
            "request_mean": _json(interval_of(parts_of(pairs, request_mean))),
        },
        **_per_step(pairs, counts),
        "prefill_ms": _mean_ms([pair.measured.prefill_s for pair in pairs]),
        "decode_ms_per_token": _ms_per_token(pairs),
        "decode_speedup": _json(interval_of(parts_of(pairs, decode_speedup))),
        "end_to_end_speedup": _json(interval_of(parts_of(pairs, end_to_end_speedup))),
        "unequal_answers": sum(pair.answer.is_equal is False for pair in pairs),
        "finish_reasons": dict(Counter(pair.measured.finish_reason for pair in pairs)),
        "accepted_lengths": None if counts is None else list(counts.histogram),
        "positions": None if counts is None else _positions(pairs, counts, has_intervals),
        "sources": None if counts is None else counts.as_json()["sources"],
    }


def _per_step(pairs: Sequence[Pair], counts: StepCounts | None) -> dict[str, Any]:
    """Over all steps; None where a server does not tell."""
    if counts is None or not counts.num_steps:
        names = ("steps", "zero_draft_steps", "drafted_per_step", "accepted_per_step")
        return dict.fromkeys((*names, "acceptance_rate", "draft_ms_per_step", "step_ms"))
    draft_s = [pair.measured.draft_s for pair in pairs]
    # A first step is not timed: it is a part of the prefill.
    num_timed = counts.num_steps - sum(bool(pair.measured.num_first) for pair in pairs)
    is_told = all(pair.measured.num_first is not None for pair in pairs)
    decode_s = sum(pair.measured.decode_s for pair in pairs)
    return {
        "steps": counts.num_steps,
        "zero_draft_steps": counts.num_zero_draft,
        "drafted_per_step": counts.num_verified / counts.num_steps,
        "accepted_per_step": counts.num_accepted / counts.num_steps,
        "acceptance_rate": counts.num_accepted / counts.num_verified
        if counts.num_verified
        else None,
        "draft_ms_per_step": None
        if None in draft_s
        else 1e3 * sum(filter(None, draft_s)) / counts.num_steps,
        "step_ms": 1e3 * decode_s / num_timed if num_timed > 0 and is_told else None,
    }


def _positions(
    pairs: Sequence[Pair], counts: StepCounts, has_intervals: bool
) -> list[dict[str, Any]]:
    """By position from 1 on; `accepted_per_evaluated` is given that the one before is accepted."""
    judged = (counts.verified, counts.evaluated, counts.accepted)
    number = max(len(found or ()) for found in judged)
    rows = []
    for index in range(number):
        accepted, evaluated = at(counts.accepted, index) or 0, at(counts.evaluated, index)
        rows.append(
            {
                "position": index + 1,
                "offered": at(counts.offered, index),
                "verified": at(counts.verified, index),
                "evaluated": evaluated,
                "accepted": accepted,
                "cut_by_stop": at(counts.cut_by_stop, index),
                "cut_by_length": at(counts.cut_by_length, index),
                "accepted_per_evaluated": _rate(pairs, index, accepted, evaluated, has_intervals),
                "accepted_per_step": _rate(
                    pairs, index, accepted, counts.num_steps, has_intervals, of_steps=True
                ),
            }
        )
    return rows


def _rate(
    pairs: Sequence[Pair],
    index: int,
    accepted: int,
    total: int | None,
    has_interval: bool,
    *,
    of_steps: bool = False,
) -> dict[str, float | None] | None:
    if not total:
        return None
    if not has_interval:
        return Interval(accepted / total).as_json()

    def part(pair: Pair) -> Part | None:
        counts = pair.measured.counts
        if counts is None:
            return None
        below = counts.num_steps if of_steps else at(counts.evaluated, index)
        return (at(counts.accepted, index) or 0, below) if below else None

    found = interval_of(parts_of(pairs, part))
    return None if found is None else _share(found).as_json()


def _share(found: Interval) -> Interval:
    """Of what lies between 0 and 1, bounds do so too."""
    if found.low is None or found.high is None:
        return found
    return Interval(found.value, max(0.0, found.low), min(1.0, found.high))


def _mean_ms(seconds: Sequence[float]) -> float | None:
    return 1e3 * sum(seconds) / len(seconds) if seconds else None


def _ms_per_token(pairs: Sequence[Pair]) -> float | None:
    numbers = [pair.measured.num_timed for pair in pairs]
    num_timed = 0 if None in numbers else sum(filter(None, numbers))
    return 1e3 * sum(pair.measured.decode_s for pair in pairs) / num_timed if num_timed else None


def _json(interval: Interval | None) -> dict[str, float | None] | None:
    return None if interval is None else interval.as_json()
