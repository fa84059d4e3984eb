"""Render: the report on equality, from comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.evals.lossless.comparison import Comparison
from specdec.evals.report.compared import Compared
from specdec.evals.report.intervals import Interval, proportion_interval
from specdec.evals.report.report import Report
from specdec.evals.report.tables import Table

NAME = "lossless"


@dataclass(frozen=True)
class Tally:
    """The comparisons of one setting at one temperature."""

    setting: str
    temperature: float
    comparisons: Sequence[Comparison]

    @property
    def num_equal(self) -> int:
        return sum(one.divergence is None for one in self.comparisons)

    def num_of(self, kind: str) -> int:
        """Divergences of a kind."""
        return sum(
            one.divergence is not None and one.divergence.kind == kind for one in self.comparisons
        )

    @property
    def num_compared(self) -> int:
        """Tokens, or characters where tokens are not known."""
        return sum(one.num_compared for one in self.comparisons)

    @property
    def num_accepted(self) -> int:
        return sum(one.answer.num_accepted for one in self.comparisons)

    @property
    def tokens_per_step(self) -> float | None:
        """None where the server does not tell."""
        steps = sum(one.answer.num_steps for one in self.comparisons)
        return 1 + self.num_accepted / steps if steps else None

    @property
    def faults(self) -> Interval:
        """The share of answers that diverge by more than rounding, with its bounds."""
        found = proportion_interval(self.num_of("fault"), len(self.comparisons))
        assert found is not None, "a setting has comparisons"
        return found

    @property
    def token_faults(self) -> Interval:
        """The same of tokens, as if each were a trial of its own."""
        return proportion_interval(self.num_of("fault"), self.num_compared) or Interval(0.0)

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "setting": self.setting,
            "temperature": self.temperature,
            "answers": len(self.comparisons),
            "compared": self.num_compared,
            "equal": self.num_equal,
            "near_ties": self.num_of("near tie"),
            "faults": self.num_of("fault"),
            "fault_rate": self.faults.as_json(),
            "fault_rate_of_tokens": self.token_faults.as_json(),
            "tokens_per_step": self.tokens_per_step,
        }


def tallies_of(comparisons: Sequence[Comparison]) -> list[Tally]:
    """By setting and temperature, in order."""
    groups: dict[tuple[str, float], list[Comparison]] = {}
    for one in comparisons:
        groups.setdefault((one.setting, one.question.temperature), []).append(one)
    return [Tally(setting, heat, group) for (setting, heat), group in groups.items()]


def make_report(
    head: Mapping[str, Any],
    comparisons: Sequence[Comparison],
    *,
    tie_margin: float,
    forgives_ties: bool,
    num_skipped: int = 0,
) -> Report:
    """head: the first entries of the report's data. `forgives_ties`: see `is_lossless`;
    `num_skipped` turns were not asked for want of room.
    """
    tallies = tallies_of(comparisons)
    has_tokens = all(
        one.plain.token_ids is not None and one.answer.token_ids is not None for one in comparisons
    )
    unit = "tokens" if has_tokens else "characters"
    diverged = [one for one in comparisons if one.divergence is not None]
    data = {
        **head,
        "num_skipped": num_skipped,
        "tie_margin": tie_margin,
        "forgives_near_ties": forgives_ties,
        "compared_by": unit,
        "is_lossless": is_lossless(comparisons, forgives_ties=forgives_ties),
        "rows": [tally.as_json() for tally in tallies],
        "divergences": [_divergence(one) for one in diverged],
        "compared": [_compared(tally).as_json() for tally in tallies],
    }
    tables = [_summary(tallies, unit)]
    if diverged:
        tables.append(_divergences(diverged))
    return Report(
        NAME,
        "Answers with speculation against answers without",
        data,
        (
            *_skipped(num_skipped),
            *_lines(tallies, comparisons, tie_margin, forgives_ties, unit),
        ),
        tuple(tables),
    )


def _skipped(number: int) -> Iterator[str]:
    if number:
        yield f"{number} later turns were not asked: their prompts leave no room in the context."


def is_lossless(comparisons: Sequence[Comparison], *, forgives_ties: bool) -> bool:
    """Whether all answers are equal; near ties may be forgiven where equal bits are no promise."""
    kinds = {one.divergence.kind for one in comparisons if one.divergence is not None}
    return not kinds or (forgives_ties and kinds == {"near tie"})


def _lines(
    tallies: Sequence[Tally],
    comparisons: Sequence[Comparison],
    tie_margin: float,
    forgives_ties: bool,
    unit: str,
) -> Iterator[str]:
    number = len(comparisons)
    num_faults = sum(tally.num_of("fault") for tally in tallies)
    num_ties = sum(tally.num_of("near tie") for tally in tallies)
    if not num_faults + num_ties:
        num_compared = sum(tally.num_compared for tally in tallies)
        yield (
            f"All {number} answers are equal: at most {_at_most(number)} of answers and "
            f"{_at_most(num_compared)} of {unit} differ (95 %, each as a trial of its own)."
        )
    else:
        yield (
            f"{num_faults + num_ties} of {number} answers differ: {num_faults} by a fault, "
            f"{num_ties} at a near tie (scores within {tie_margin:.2g} of the best, "
            "which rounding can turn)."
        )
    if num_ties:
        yield (
            "Near ties are forgiven: equal bits were not asked for."
            if forgives_ties
            else "Near ties fail too: every token's logits are to be the same bits in any batch."
        )
    if unit != "tokens":
        yield "There are no token ids, so texts are compared, and no margins are known."
    for tally in tallies:
        if tally.tokens_per_step is None:
            yield f"WARNING: {_name(tally)}: the server does not tell whether it speculated."
        elif not tally.num_accepted:
            yield (
                f"WARNING: {_name(tally)}: no draft was accepted, so equality proves nothing about "
                "speculation; take longer answers, other data or another drafter."
            )


def _at_most(number: int) -> str:
    """The upper bound of a share of which none was seen."""
    bound = proportion_interval(0, number)
    return "100 %" if bound is None or bound.high is None else f"{100 * bound.high:.2g} %"


def _name(tally: Tally) -> str:
    return f"{tally.setting} at temperature {tally.temperature:g}"


def _summary(tallies: Sequence[Tally], unit: str) -> Table:
    rows = [
        (
            tally.setting,
            tally.temperature,
            len(tally.comparisons),
            tally.num_compared,
            tally.num_equal,
            tally.num_of("near tie"),
            tally.num_of("fault"),
            None if tally.faults.high is None else round(100 * tally.faults.high, 2),
            tally.tokens_per_step,
        )
        for tally in tallies
    ]
    columns = ("setting", "temperature", "answers", unit, "equal", "near ties", "faults")
    note = "`faults at most`: upper bound of the share of answers with a fault, in percent (95 %)"
    return Table("answers", (*columns, "faults at most", "tokens per step"), rows, note)


def _divergences(diverged: Sequence[Comparison]) -> Table:
    rows = []
    for one in diverged:
        found = one.divergence
        assert found is not None
        rows.append(
            (
                one.setting,
                one.question.sample.task,
                one.question.name,
                one.question.temperature,
                found.position,
                _shown(found.plain, found.plain_text),
                _shown(found.other, found.other_text),
                found.origin or None,
                None if found.margin is None else found.margin.top2,
                None if found.margin is None else found.margin.gap,
                found.kind,
            )
        )
    columns = ("setting", "task", "sample", "temperature", "position", "plain", "speculative")
    note = "first difference of each answer; positions count from 0, `gap` is below the best score"
    return Table(
        "divergences", (*columns, "source and depth", "top-2 margin", "gap", "kind"), rows, note
    )


def _shown(token: int | None, text: str) -> str:
    if token is None:
        return repr(text) if text else "the end"
    return f"{token} {text!r}" if text else str(token)


def _divergence(one: Comparison) -> dict[str, Any]:
    assert one.divergence is not None
    question = one.question
    return {
        "setting": one.setting,
        "task": question.sample.task,
        "sample": question.sample.sample_id,
        "turn": question.turn,
        "temperature": question.temperature,
        "seed": question.seed,
        **one.divergence.as_json(),
    }


def _compared(tally: Tally) -> Compared:
    parts: dict[str, tuple[float, float]] = {}
    for one in tally.comparisons:
        name = one.question.sample.sample_id
        differ, all_of = parts.get(name, (0.0, 0.0))
        parts[name] = (differ + (one.divergence is not None), all_of + 1)
    num_differ = len(tally.comparisons) - tally.num_equal
    share = proportion_interval(num_differ, len(tally.comparisons))
    assert share is not None
    return Compared(
        _name(tally), "share of answers that differ", share, is_higher_better=False, parts=parts
    )
