"""Tables: a run's figures for the terminal, in full for files, and as README has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.evals.report.tables import Table

Data = Mapping[str, Any]
_SHOWN_POSITIONS = 8  # on a terminal; files have all
LOSES = "(loses)"


def shown_first(data: Data) -> list[Table]:
    """What fits a terminal."""
    return [_tokens_by_task(data), _costs(data), *_speeds(data), *_rates(data)]


def details(data: Data) -> list[Table]:
    """Every figure with its interval, a row each."""
    return [_by_task(data), _positions(data), _lengths(data), _sources(data)]


def markdown(data: Data) -> str:
    """Tokens per step by task, and over all tasks draft cost and speed, as README has them."""
    tasks = data["tasks"]
    rows = []
    for entry in data["settings"]:
        total, speed = entry["all"], value(entry["all"]["decode_speedup"])
        rows.append(
            (
                entry["name"],
                *(_fixed(_tokens_per_step(entry["tasks"].get(task)), 2) for task in tasks),
                _fixed(total["drafted_per_step"], 1),
                _fixed(total["draft_ms_per_step"], 2),
                _fixed(total["step_ms"], 1),
                "-" if speed is None else " ".join([f"{speed:.2f}x", *_loses(speed)]),
            )
        )
    columns = ("`--drafter`", *tasks, "nodes", "draft ms", "step ms", "speed")
    return "\n".join(Table("readme", columns, rows).markdown())


def value(interval: Mapping[str, Any] | None) -> float | None:
    """The middle of an interval of a report."""
    return None if interval is None else interval["value"]


def _tokens_by_task(data: Data) -> Table:
    return Table(
        "tokens-per-step",
        ("setting", *data["tasks"], "all"),
        [
            (
                entry["name"],
                *(_tokens_per_step(entry["tasks"].get(task)) for task in data["tasks"]),
                _tokens_per_step(entry["all"]),
            )
            for entry in data["settings"]
        ],
        "tokens per step by task, over all steps (token-weighted):",
    )


def _costs(data: Data) -> Table:
    return Table(
        "steps",
        (
            *("setting", "tokens/step", "low", "high"),
            *("request mean", "mean low", "mean high"),
            *("nodes/step", "accepted/step", "draft ms", "step ms", "prefill ms"),
        ),
        [
            (
                entry["name"],
                *bounds(entry["all"]["tokens_per_step"]["token_weighted"]),
                *bounds(entry["all"]["tokens_per_step"]["request_mean"]),
                entry["all"]["drafted_per_step"],
                entry["all"]["accepted_per_step"],
                entry["all"]["draft_ms_per_step"],
                entry["all"]["step_ms"],
                entry["all"]["prefill_ms"],
            )
            for entry in data["settings"]
        ],
        "over all tasks; low and high are 95 % intervals over samples:",
    )


def _speeds(data: Data) -> Iterator[Table]:
    """None without plain decoding."""
    if all(entry["all"]["end_to_end_speedup"] is None for entry in data["settings"]):
        return
    yield Table(
        "speed-up",
        (
            *("setting", "decode", "low", "high", "verdict"),
            *("end to end", "end low", "end high", "answers", "unequal"),
        ),
        [
            (
                entry["name"],
                *bounds(entry["all"]["decode_speedup"]),
                *(_loses(value(entry["all"]["decode_speedup"])) or ("",)),
                *bounds(entry["all"]["end_to_end_speedup"]),
                entry["all"]["answers"],
                entry["all"]["unequal_answers"],
            )
            for entry in data["settings"]
        ],
        "times the speed of plain decoding; decode is without the prompt, end to end with it:",
    )


def _rates(data: Data) -> Iterator[Table]:
    """Accepted per step by position: what tokens per step are made of."""
    entries = [entry for entry in data["settings"] if entry["all"]["positions"]]
    number = max((len(entry["all"]["positions"]) for entry in entries), default=0)
    columns = range(min(number, _SHOWN_POSITIONS))
    if entries:
        yield Table(
            "accepted-per-step",
            ("setting", *(str(index + 1) for index in columns)),
            [
                (entry["name"], *(_rate(entry["all"]["positions"], index) for index in columns))
                for entry in entries
            ],
            "share of steps that accepted a guess at each position:",
        )


def _by_task(data: Data) -> Table:
    return Table(
        "by-task",
        (
            *("setting", "task", "answers", "steps", "zero-draft steps"),
            *("tokens/step", "tokens/step low", "tokens/step high"),
            *("request mean", "request mean low", "request mean high"),
            *("decode speed-up", "decode low", "decode high", "verdict"),
            *("end-to-end speed-up", "end-to-end low", "end-to-end high", "unequal"),
        ),
        [
            (
                *(entry["name"], task, found["answers"]),
                *(found["steps"], found["zero_draft_steps"]),
                *bounds(found["tokens_per_step"]["token_weighted"]),
                *bounds(found["tokens_per_step"]["request_mean"]),
                *bounds(found["decode_speedup"]),
                *(_loses(value(found["decode_speedup"])) or ("",)),
                *bounds(found["end_to_end_speedup"]),
                found["unequal_answers"],
            )
            for entry in data["settings"]
            for task, found in [*entry["tasks"].items(), ("all", entry["all"])]
        ],
        "by setting and task:",
    )


def _positions(data: Data) -> Table:
    counts = ("offered", "verified", "evaluated", "accepted", "cut_by_stop", "cut_by_length")
    return Table(
        "positions",
        (
            *("setting", "position", *(name.replace("_", " ") for name in counts)),
            *("accepted/evaluated", "accepted/evaluated low", "accepted/evaluated high"),
            *("accepted/step", "accepted/step low", "accepted/step high"),
        ),
        [
            (
                *(entry["name"], row["position"], *(row[name] for name in counts)),
                *bounds(row["accepted_per_evaluated"]),
                *bounds(row["accepted_per_step"]),
            )
            for entry in data["settings"]
            for row in entry["all"]["positions"] or ()
        ],
        "by position, over all tasks; offered and verified are nodes, the others steps:",
    )


def _lengths(data: Data) -> Table:
    return Table(
        "accepted-lengths",
        ("setting", "accepted length", "steps"),
        [
            (entry["name"], length, steps)
            for entry in data["settings"]
            for length, steps in enumerate(entry["all"]["accepted_lengths"] or ())
        ],
        "steps by accepted length, over all tasks:",
    )


def _sources(data: Data) -> Table:
    return Table(
        "sources",
        ("setting", "drafter", "verified", "evaluated", "accepted"),
        [
            (entry["name"], name, counts["verified"], counts["evaluated"], counts["accepted"])
            for entry in data["settings"]
            for name, counts in (entry["all"]["sources"] or {}).items()
        ],
        "nodes by drafter; one that several guessed counts for each:",
    )


def _tokens_per_step(found: Mapping[str, Any] | None) -> float | None:
    return None if found is None else value(found["tokens_per_step"]["token_weighted"])


def _rate(positions: Sequence[Mapping[str, Any]], index: int) -> float | None:
    if index >= len(positions):
        return None
    return value(positions[index]["accepted_per_step"])


def bounds(interval: Mapping[str, Any] | None) -> tuple[float | None, ...]:
    """Value, low and high of an interval of a report, for three cells of a row."""
    found = interval or {}
    return found.get("value"), found.get("low"), found.get("high")


def _loses(speed: float | None) -> tuple[str, ...]:
    return (LOSES,) if speed is not None and speed < 1 else ()


def _fixed(number: float | None, digits: int) -> str:
    return "-" if number is None else f"{number:.{digits}f}"
