"""Report: the figures of every setting by task, what is to be read first, what to compare by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from specdec.evals.acceptance import plots, tables
from specdec.evals.acceptance.answer import Answer
from specdec.evals.acceptance.bench import Found
from specdec.evals.acceptance.figures import (
    Pair,
    by_task,
    decode_speedup,
    figures,
    interval_of,
    pairs_of,
    parts_of,
    token_weighted,
)
from specdec.evals.acceptance.setting import Setting
from specdec.evals.report.compared import Compared
from specdec.evals.report.report import Report

NAME = "acceptance"
ALL = "all"  # of the tasks
_COMPARED = {"tokens per step": token_weighted, "decode speed-up": decode_speedup}


def report_of(
    head: Mapping[str, Any],
    settings: Sequence[Setting],
    found: Found,
    must_be_equal: Callable[[Setting], bool],
) -> Report:
    """The report of a run.

    head: where the figures are from, its first entries; must_be_equal: whether a setting's
    verification promises the plain answer, token by token.
    """
    groups = {setting: _pairs(found.answers, settings, setting) for setting in settings}
    data = {
        **head,
        "num_skipped": found.num_skipped,
        "tasks": list(dict.fromkeys(answer.task for answer in found.answers)),
        "settings": [
            {"must_be_equal": must_be_equal(setting), **_entry(setting, pairs)}
            for setting, pairs in groups.items()
        ],
        "compared": [
            entry.as_json()
            for setting, pairs in groups.items()
            for entry in _compared(setting, pairs)
        ],
    }
    return Report(
        NAME,
        "Acceptance: tokens per step and speed by drafter and task",
        data,
        list(_lines(data)),
        tables.shown_first(data),
        {name: partial(draw, data) for name, draw in plots.drawable(data).items()},
        tables.details(data),
    )


def has_unequal(data: Mapping[str, Any]) -> bool:
    """Whether an answer is not the plain one although it must be."""
    return any(
        entry["must_be_equal"] and entry["all"]["unequal_answers"] for entry in data["settings"]
    )


def _pairs(answers: Sequence[Answer], settings: Sequence[Setting], own: Setting) -> list[Pair]:
    plain = next(
        (item.name for item in settings if item.is_plain and item.temperature == own.temperature),
        None,
    )
    return pairs_of(answers, own.name, plain)


def _entry(setting: Setting, pairs: Sequence[Pair]) -> dict[str, Any]:
    return {
        **vars(setting),
        "tasks": {task: figures(own, has_intervals=False) for task, own in by_task(pairs).items()},
        "all": figures(pairs, has_intervals=True),
    }


def _compared(setting: Setting, pairs: Sequence[Pair]) -> Iterator[Compared]:
    for task, own in {**by_task(pairs), ALL: pairs}.items():
        for figure, part_of in _COMPARED.items():
            parts = parts_of(own, part_of)
            interval = interval_of(parts)
            if not setting.is_plain and interval is not None:
                yield Compared(f"{setting.name}, {task}", figure, interval, parts=parts)


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    num_answers = data["settings"][0]["all"]["answers"]
    yield (
        f"{num_answers} answers per setting of up to {data['max_tokens']} tokens, "
        f"{data.get('model', '')} {_where(data)}"
    )
    if data["num_skipped"]:
        yield (
            f"{data['num_skipped']} turns were skipped: their prompts leave no room in the context "
            f"for {data['max_tokens']} more tokens"
        )
    for entry in data["settings"]:
        yield from _verdict(entry["name"], entry["all"])
    num_unequal = sum(entry["all"]["unequal_answers"] for entry in data["settings"])
    if num_unequal:
        why = "" if has_unequal(data) else ", as this verification allows"
        yield f"{num_unequal} answers DIFFER from the plain ones{why}"
    elif any(entry["drafter"] == "none" for entry in data["settings"]):
        yield "every answer equals the plain one"


def _verdict(name: str, total: Mapping[str, Any]) -> Iterator[str]:
    """More tokens per step are not more speed: say so."""
    speed, tokens = total["decode_speedup"], total["tokens_per_step"]["token_weighted"]
    if speed and tokens and speed["value"] < 1 < tokens["value"]:
        yield (
            f"{name}: {tokens['value']:.2f} tokens per step, yet {speed['value']:.2f} times the "
            "speed of plain decoding (loses)"
        )


def _where(data: Mapping[str, Any]) -> str:
    return f"at {data['url']}" if "url" in data else f"with {data['weights']} weights"
