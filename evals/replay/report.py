"""Report: a replay's figures, in the form of live ones, so that tables and plots serve both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from specdec.evals.acceptance import plots, tables
from specdec.evals.acceptance.figures import (
    Pair,
    by_task,
    figures,
    interval_of,
    pairs_of,
    parts_of,
    token_weighted,
)
from specdec.evals.acceptance.setting import PLAIN, Setting
from specdec.evals.replay.bench import Replayed
from specdec.evals.report.compared import Compared
from specdec.evals.report.report import Report
from specdec.evals.report.tables import Table

NAME = "replay"
ALL = "all"  # of the tasks
# What a replay does not have: it computes no prompt, and has no second answer to differ from.
_NOT_LIVE = ("prefill_ms", "end_to_end_speedup", "unequal_answers")
_PREDICTED = ("decode_ms_per_token", "step_ms")  # of a step cost curve
_DETAILS = ("positions", "accepted-lengths", "sources")


def report_of(head: Mapping[str, Any], found: Mapping[Setting, Replayed]) -> Report:
    """The report of a run. head: where the figures are from, its first entries."""
    is_predicted = any(setting.is_plain for setting in found)
    answers = [answer for replayed in found.values() for answer in replayed.answers]
    plain = PLAIN if is_predicted else None
    groups = {setting: pairs_of(answers, setting.name, plain) for setting in found}
    data = {
        **head,
        "tasks": list(dict.fromkeys(answer.task for answer in answers)),
        "settings": [
            {
                **vars(setting),
                "temperature": None,  # the recordings', whatever it was
                "replay_tokens_per_second": _speed(found[setting]),
                "tasks": {
                    task: _figures(own, is_predicted, has_intervals=False)
                    for task, own in by_task(pairs).items()
                },
                ALL: _figures(pairs, is_predicted, has_intervals=True),
            }
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
        "Replay: tokens per step of recorded answers by drafter and task",
        data,
        list(_lines(data)),
        list(_tables(data)),
        {name: partial(draw, data) for name, draw in plots.drawable(data).items()},
        [table for table in tables.details(data) if table.name in _DETAILS],
    )


def _figures(pairs: Sequence[Pair], is_predicted: bool, *, has_intervals: bool) -> dict[str, Any]:
    left_out = _NOT_LIVE if is_predicted else (*_NOT_LIVE, *_PREDICTED)
    return figures(pairs, has_intervals=has_intervals) | dict.fromkeys(left_out)


def _compared(setting: Setting, pairs: Sequence[Pair]) -> Iterator[Compared]:
    for task, own in {**by_task(pairs), ALL: pairs}.items():
        parts = parts_of(own, token_weighted)
        interval = interval_of(parts)
        if interval is not None and not setting.is_plain:
            yield Compared(f"{setting.name}, {task}", "tokens per step", interval, parts=parts)


def _speed(replayed: Replayed) -> float:
    return sum(answer.measured.num_output for answer in replayed.answers) / replayed.replay_s


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    total = data["settings"][0][ALL]
    yield (
        f"{total['answers']} recorded answers, {total['output_tokens']} tokens of {data['model']}; "
        "no target ran"
    )
    if data["step_cost"] is not None:
        yield f"speeds are predicted, by the step costs of {data['step_cost']}"


def _tables(data: Mapping[str, Any]) -> Iterator[Table]:
    by_name = {table.name: table for table in tables.shown_first(data)}
    yield by_name["tokens-per-step"]
    yield _steps(data)
    if "accepted-per-step" in by_name:
        yield by_name["accepted-per-step"]


def _steps(data: Mapping[str, Any]) -> Table:
    columns: tuple[str, ...] = (
        *("setting", "tokens/step", "low", "high", "request mean", "mean low", "mean high"),
        *("nodes/step", "accepted/step", "draft us", "replayed tokens/s"),
    )
    if data["step_cost"] is not None:
        columns += ("predicted speed", "speed low", "speed high", "verdict")
    return Table(
        "steps",
        columns,
        [_row(entry, data["step_cost"] is not None) for entry in data["settings"]],
        "over all tasks; low and high are 95 % intervals over samples:",
    )


def _row(entry: Mapping[str, Any], is_predicted: bool) -> tuple[object, ...]:
    total = entry[ALL]
    tokens, speed = total["tokens_per_step"], total["decode_speedup"]
    row: tuple[object, ...] = (
        entry["name"],
        *tables.bounds(tokens["token_weighted"]),
        *tables.bounds(tokens["request_mean"]),
        total["drafted_per_step"],
        total["accepted_per_step"],
        1e3 * total["draft_ms_per_step"],
        entry["replay_tokens_per_second"],
    )
    if not is_predicted:
        return row
    loses = speed is not None and speed["value"] < 1
    return (*row, *tables.bounds(speed), tables.LOSES if loses else "")
