"""Tables: a latency measurement's figures for the terminal, and in full for files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.evals.latency.side import OURS
from specdec.evals.latency.step_clock import PARTS
from specdec.evals.report.spread import PERCENTS
from specdec.evals.report.tables import Table

Data = Mapping[str, Any]
_PERCENTS = [f"p{percent}" for percent in PERCENTS]
SHOWN_PARTS = (*PARTS, "rest", "deliver")  # in the order in which they happen
KEPT = ("value", "low", "high")


def shown_first(data: Data) -> list[Table]:
    """What fits a terminal."""
    tables = [_steps(data)] if "steps" in data else []
    tables += [_breakdown(data), _lengths(data), _speeds(data), _ratios(data)]
    return tables + ([_over(data)] if data["temperature_ratios"] else [])


def details(data: Data) -> list[Table]:
    """Every figure, and every prompt."""
    return [_answers(data), _times(data), _prompts(data), _every_ratio(data)]


def short(contender: str) -> str:
    """A contender's name in a head or a plot. Example: `short("specdec, ngram") == "ngram"`."""
    return contender.removeprefix(OURS)


def tasks_of(data: Data) -> list[str]:
    """The tasks of its prompts, in order."""
    return list(data["temperatures"][0]["tasks"])


def names_of(data: Data, found: Data) -> list[str]:
    """The contenders at a temperature, ours first; a name that stands for several settings instead
    of these.

    found: an entry of a report's `temperatures`.
    """
    ours, best_of = data["settings"]["ours"], data["settings"]["best_of"]
    stands_for = {setting: name for name, of in best_of.items() for setting in of}
    shown = (stands_for.get(name, name) for name in found["speeds"])
    return list(dict.fromkeys([ours, *shown]))


def every_name(data: Data) -> list[str]:
    """Contenders at any temperature, ours first."""
    found = (name for one in data["temperatures"] for name in names_of(data, one))
    return list(dict.fromkeys(found))


def label(data: Data, name: str) -> str:
    """A contender's name, which says where it is the best of several settings."""
    return f"{name}, best" if name in data["settings"]["best_of"] else name


def ratio_to(data: Data, found: Data, name: str) -> Data | None:
    """How many times as fast as a contender ours is, by task and over all; None of ours itself."""
    ratio: Data | None = found["ratios"].get(f"{data['settings']['ours']} / {name}")
    return ratio


def how(found: Data) -> str:
    """Example: `how({"temperature": 0.8, ...}) == "temperature 0.8"`."""
    return f"temperature {found['temperature']:g}" if found["temperature"] else "greedy"


def _steps(data: Data) -> Table:
    return Table(
        "steps",
        ("context", "rows", *_names("fwd"), *_names("step"), "fwd/fl", "step/fl", "/fl+KV", "fl%"),
        [
            (
                cell["context"],
                cell["rows"],
                *(cell["forward_ms"][p] for p in _PERCENTS),
                *(cell["step_ms"][p] for p in _PERCENTS),
                cell["forward_per_floor"],
                cell["step_per_floor"],
                cell["step_per_floor_with_kv"],
                round(100 * cell["floor_share"]),
            )
            for cell in data["steps"]
        ],
        "forward and engine step in ms; ratios to the floor, the last with the context's KV, "
        "which fl% turns round",
    )


def breakdowns(data: Data) -> dict[str, Data]:
    """Of our contenders, with the temperature in the name where there are several."""
    several = len(data["temperatures"]) > 1
    return {
        short(name) + (f", {found['temperature']:g}" if several else ""): medians
        for found in data["temperatures"]
        for name, medians in found["breakdown"].items()
        if medians  # none of answers of one token
    }


def _breakdown(data: Data) -> Table:
    by_name = breakdowns(data)
    parts = [*SHOWN_PARTS, "step", "rows", "steps"] if by_name else []
    return Table(
        "breakdown",
        ("part", *by_name),
        [(part, *(medians[part] for medians in by_name.values())) for part in parts],
        "where a decode step's ms go (medians); delivery comes after the step and is not in it",
    )


def _lengths(data: Data) -> Table:
    return Table(
        "lengths",
        ("temp", "task", "prompts", "tokens", "mean", "least"),
        [
            (
                *(found["temperature"], task, of["num_prompts"]),
                *(of["num_tokens"], of["mean_tokens"], of["min_tokens"]),
            )
            for found in data["temperatures"]
            for task, of in found["tasks"].items()
        ],
        "tokens of the answers, the same for everybody: as many as plain decoding's natural answer",
    )


def _speeds(data: Data) -> Table:
    tasks = tasks_of(data)
    return Table(
        "speeds",
        ("temp", "contender", *tasks, "all", "low", "high"),
        [
            (
                *(found["temperature"], label(data, name)),
                *_cells(found["speeds"][name], tasks, 1),
            )
            for found in data["temperatures"]
            for name in names_of(data, found)
        ],
        "tokens/s end to end, prompt included: medians of tasks, geometric mean of all with 95 % "
        "interval",
    )


def _ratios(data: Data) -> Table:
    tasks, ours = tasks_of(data), data["settings"]["ours"]
    return Table(
        "ratios",
        ("temp", "against", *tasks, "all", "low", "high"),
        [
            (found["temperature"], label(data, name), *_cells(ratio, tasks, 2))
            for found in data["temperatures"]
            for name in names_of(data, found)
            if (ratio := ratio_to(data, found, name)) is not None
        ],
        f"speed of {ours} over another's, prompt by prompt: medians of tasks, geometric mean of "
        "all",
    )


def _over(data: Data) -> Table:
    tasks = tasks_of(data)
    return Table(
        "temperatures",
        ("contender", "speed at", *tasks, "all", "low", "high", "decode"),
        [
            (
                *(label(data, name), f"{found['temperature']:g} / {found['over']:g}"),
                *_cells(ratio, tasks, 2),
                None if ratio["decode"] is None else round(ratio["decode"]["value"], 2),
            )
            for found in data["temperature_ratios"]
            for name in every_name(data)
            if (ratio := found["contenders"].get(name)) is not None
        ],
        "speed at one temperature over another, prompt by prompt; decode: after the first token",
    )


def _cells(summary: Data, tasks: list[str], digits: int) -> list[float | None]:
    values = [*(summary["tasks"][task] for task in tasks), *(summary["all"][b] for b in KEPT)]
    return [None if value is None else round(value, digits) for value in values]


def _answers(data: Data) -> Table:
    return Table(
        "answers",
        (
            *("temp", "task", "contender", "tokens/s", "min", "max"),
            *("decode/s", "tokens", "per step", "equal"),
        ),
        [
            (
                *(found["temperature"], task, name, row["tokens_per_second"]),
                *(row["min"], row["max"], row["decode_tokens_per_second"], of["num_tokens"]),
                *(row["tokens_per_step"], row["num_equal"]),
            )
            for found in data["temperatures"]
            for task, of in found["tasks"].items()
            for name, row in of["contenders"].items()
        ],
        "end to end, prompt included: median, slowest and fastest prompt; decode: after the first "
        "token; equal: tokens before the first that differs",
    )


def _times(data: Data) -> Table:
    kinds = ("ttft", "step", "token")
    return Table(
        "times",
        ("temp", "task", "contender", *(name for kind in kinds for name in _names(kind))),
        [
            (
                *(found["temperature"], task, name),
                *(
                    None if row[f"{kind}_ms"] is None else row[f"{kind}_ms"][p]
                    for kind in kinds
                    for p in _PERCENTS
                ),
            )
            for found in data["temperatures"]
            for task, of in found["tasks"].items()
            for name, row in of["contenders"].items()
        ],
        "ms to the first token, between arrivals, and per token (a step's time over its tokens)",
    )


def _prompts(data: Data) -> Table:
    return Table(
        "prompts",
        ("temp", "prompt", "task", "prompt tokens", "tokens", "contender", "tokens/s", "best"),
        [
            (
                *(found["temperature"], sample, prompt["task"], prompt["prompt_tokens"]),
                *(prompt["num_tokens"], name, speed, prompt["best"].get(name)),
            )
            for found in data["temperatures"]
            for sample, prompt in found["prompts"].items()
            for name, speed in prompt["tokens_per_second"].items()
        ],
        "every prompt; best: the fastest setting of a peer on it",
    )


def _every_ratio(data: Data) -> Table:
    tasks = tasks_of(data)
    return Table(
        "every-ratio",
        ("temp", "contender", "against", *tasks, "all", "low", "high"),
        [
            (found["temperature"], *pair.split(" / "), *_cells(ratio, tasks, 3))
            for found in data["temperatures"]
            for pair, ratio in found["ratios"].items()
        ],
        "speed of each of ours over that of each other",
    )


def _names(kind: str) -> list[str]:
    return [f"{kind}{percent}" for percent in PERCENTS]
