"""RenderDistribution: the report on distributions, from their tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.evals.lossless.distribution import LEVEL, NUM_POSITIONS, Found, Tested
from specdec.evals.report.report import Report
from specdec.evals.report.tables import Table

NAME = "lossless-distribution"


def make_report(head: Mapping[str, Any], found: Found, draws: int) -> Report:
    """head: the first entries of the report's data. draws: of each side."""
    data = {
        **head,
        "draws": draws,
        "positions": NUM_POSITIONS,
        "level": LEVEL,
        "is_lossless": found.is_lossless,
        "settings": [
            {"setting": setting, "temperature": heat, "tokens_per_step": _per_step(counts)}
            for (setting, heat), counts in found.counts.items()
        ],
        "tests": [_test(one) for one in found.tests],
    }
    return Report(
        NAME,
        "First tokens drawn with speculation against draws without",
        data,
        tuple(_lines(found, draws)),
        (_table(found),),
    )


def _lines(found: Found, draws: int) -> Iterator[str]:
    if found.tests:
        yield from _verdict(found.tests, draws)
    else:
        yield (
            f"NOTHING WAS TESTED: all of {draws} draws on each side were equal, or no two tokens "
            "came often enough; give a higher --temperature, or more --draws."
        )
    for (setting, heat), counts in found.counts.items():
        if not counts[0]:
            yield f"WARNING: {_name(setting, heat)}: the server does not say whether it speculated."
        elif not counts[1]:
            yield (
                f"WARNING: {_name(setting, heat)}: no draft was accepted, so this proves nothing "
                "about speculation; take other data or another drafter."
            )


def _verdict(tests: Sequence[Tested], draws: int) -> Iterator[str]:
    lowest = min(tests, key=lambda one: one.corrected)
    yield (
        f"{len(tests)} chi-squared tests of {draws} draws on each side, Holm-corrected: "
        f"the smallest p is {lowest.corrected:.3g}."
    )
    failed = [one for one in tests if one.is_different]
    if failed:
        names = ", ".join(dict.fromkeys(_name(one.setting, one.temperature) for one in failed))
        yield f"The distributions DIFFER in {len(failed)} tests (p below {LEVEL}): {names}."
    else:
        yield f"No difference is seen (none has p below {LEVEL})."


def _name(setting: str, temperature: float) -> str:
    return f"{setting} at temperature {temperature:g}"


def _per_step(counts: tuple[int, int]) -> float | None:
    return 1 + counts[1] / counts[0] if counts[0] else None


def _table(found: Found) -> Table:
    rows = [
        (
            one.setting,
            one.temperature,
            one.sample.sample_id,
            one.position,
            one.test.num_draws,
            one.test.num_histories,
            one.test.degrees,
            one.test.statistic,
            one.test.p_value,
            one.corrected,
            one.test.variation,
            one.test.by_chance,
            "DIFFERS" if one.is_different else "",
        )
        for one in found.tests
    ]
    columns = (
        *("setting", "temperature", "sample", "position", "draws", "histories", "degrees"),
        *("chi-squared", "p", "corrected p", "variation", "by chance", "verdict"),
    )
    note = "`variation`: total variation distance of both sides; `by chance`: of draws of one kind"
    return Table("tests", columns, rows, note)


def _test(one: Tested) -> dict[str, Any]:
    return {
        "setting": one.setting,
        "temperature": one.temperature,
        "sample": one.sample.sample_id,
        "position": one.position,
        **one.test.as_json(),
        "corrected_p": one.corrected,
        "is_different": one.is_different,
    }
