"""Cases for tests of acceptance: steps that could have been, and answers made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from specdec.evals.acceptance.answer import Answer, Measured
from specdec.evals.acceptance.asker import Asker
from specdec.evals.acceptance.bench import Found, measure
from specdec.evals.acceptance.step_counts import StepCounts
from specdec.evals.data.sample import Sample
from specdec.evals.report.journal import Journal
from specdec.step_record import StepRecord


@st.composite
def steps(draw: st.DrawFn, *, is_last_cut: bool = False) -> list[StepRecord]:
    """Steps of one answer; only the last one may have been cut."""
    found = [draw(step()) for _ in range(draw(st.integers(0, 12)))]
    return [*found, draw(step(is_cut=is_last_cut))]


@st.composite
def step(draw: st.DrawFn, *, is_cut: bool = False) -> StepRecord:
    """A step over a tree with a few nodes at each depth."""
    depth = draw(st.integers(1 if is_cut else 0, 5))
    verified = [draw(st.integers(1, 3)) for _ in range(depth)]
    offered = [number + draw(st.integers(0, 2)) for number in verified]
    offered += [1] * draw(st.integers(0, 2))
    path = draw(st.integers(1 if is_cut else 0, depth))
    judged = path + (draw(st.booleans()) if path < depth else 0)
    num_cut = draw(st.integers(1, path)) if is_cut else 0
    by = {"a": draw(st.integers(0, 4)), "b": draw(st.integers(0, 4))}
    return StepRecord(
        tuple(offered),
        tuple(verified),
        judged,
        path - num_cut,
        num_cut,
        path - num_cut + (not num_cut),
        {name: 2 * number for name, number in by.items() if number},
        {name: number for name, number in by.items() if number},
    )


def counts(accepted: Sequence[int], drafted: int = 4) -> StepCounts:
    """Of chains of `drafted` nodes, of which so many were accepted step by step."""
    return StepCounts.of(
        [
            StepRecord(
                (1,) * drafted,
                (1,) * drafted,
                min(number + 1, drafted),
                number,
                0,
                number + 1,
                {"a": min(number + 1, drafted)} if drafted else {},
                {"a": number} if number else {},
            )
            for number in accepted
        ],
        "length",
        {"a": drafted * len(accepted)} if drafted else {},
    )


def answer(
    sample_id: str,
    setting: str,
    accepted: Sequence[int],
    decode_s: float,
    *,
    task: str = "chat",
    drafted: int = 4,
    is_equal: bool = True,
    **measured: Any,
) -> Answer:
    """An answer of chains, whose first step belongs to the second that its prompt took."""
    return Answer(
        sample_id,
        task,
        0,
        setting,
        is_equal,
        Measured(
            **{
                "num_prompt": 10,
                "num_output": len(accepted) + sum(accepted),
                "num_first": accepted[0] + 1,
                "prefill_s": 1.0,
                "decode_s": decode_s,
                "draft_s": 0.1 * len(accepted),
                "finish_reason": "length",
                "counts": counts(accepted, drafted),
                **measured,
            }
        ),
    )


def chats(texts: Sequence[str], **more: Any) -> list[Sample]:
    """Samples of one user's turn each."""
    return [
        Sample(f"s{number}", "chat", ({"role": "user", "content": text},), **more)
        for number, text in enumerate(texts)
    ]


def asked(
    asker: Asker, samples: Sequence[Sample], max_tokens: int, out: Path | None = None
) -> Found:
    """A whole run without a report."""
    with Journal(out, {}) as journal:
        return measure(asker, samples, journal, max_tokens=max_tokens)
