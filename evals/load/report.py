"""Load report: a run's levels as tables, sentences, figures and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from specdec.evals.load.gain import crossover, gains
from specdec.evals.load.knee import MAX_REFUSED, knee
from specdec.evals.load.summary import Level, by_label, unit, without_details
from specdec.evals.report.compared import Compared
from specdec.evals.report.intervals import Interval
from specdec.evals.report.json_text import json_text
from specdec.evals.report.machine import origin
from specdec.evals.report.report import Report
from specdec.evals.report.tables import Table

NAME = "load"


def load_report(settings: Mapping[str, Any], levels: Sequence[Level]) -> Report:
    """A report on levels as `summarize` gives them; `settings` are those of the run."""
    data: dict[str, Any] = {
        **origin("aiohttp"),
        "settings": dict(settings),
        "levels": [without_details(level) for level in levels],
        "knees": {label: knee_of(own) for label, own in by_label(levels).items()},
        "gains": {
            label: {"by_load": [[load, ratio] for load, ratio in gain.items()]}
            | {"crossover": crossover(gain)}
            for label, gain in gains(levels).items()
        },
        "compared": [one.as_json() for level in levels for one in _compared(level)],
    }
    from specdec.evals.load import plot  # imports matplotlib only when it draws

    drawn = {
        "latency": plot.latency,
        "frontier": plot.frontier,
        **({"goodput": plot.goodput} if settings["goals"] else {}),
        **({"gain": plot.gain} if data["gains"] else {}),
    }
    return Report(
        NAME,
        f"{levels[0]['model_id'] if levels else 'A server'} under load",
        data,
        lines=list(_lines(data)),
        tables=list(_tables(data)),
        figures={name: partial(draw, data) for name, draw in drawn.items()},
    )


def level_files(levels: Sequence[Level]) -> dict[str, str]:
    """A file per level, flat and with an entry per request, as vLLM's benchmark writes it."""
    return {level["file"]: json_text(level) + "\n" for level in levels}


def knee_of(levels: Sequence[Level]) -> float | None:
    """The load at the knee of one series, in rising order; None if there is none yet."""
    found = knee(
        [level["output_throughput"] or 0.0 for level in levels],
        [_seconds(level["mean_e2el_including_client_queue_ms"]) for level in levels],
        list(map(_refused, levels)),
    )
    return None if found is None else float(levels[found]["load"])


def _refused(level: Level) -> float:
    """The share of requests that got no answer."""
    share: float = (level["overloaded"] + level["failed"]) / max(1, level["num_prompts"])
    return share


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _head(levels: Sequence[Level]) -> str:
    """The same as the head of a column, beside one of the requests that were answered."""
    return "clients" if levels[0]["max_concurrency"] is not None else "rate"


def _amount(load: float, what: str) -> str:
    """Example: `_amount(1, "clients")` is "1 client"."""
    return f"{load:.3g} {what.replace('clients', 'client') if load == 1 else what}"


def _compared(level: Level) -> Iterator[Compared]:
    of = ", ".join(filter(None, (level["label"], level["level"])))
    intervals = level["intervals"]
    names = [str(index) for index in level["indices"]]
    is_well = [not error and seconds > 0 for error, seconds in zip(*_answers(level), strict=True)]
    by_request = {
        "mean_ttft_ms": [(1e3 * seconds, 1.0) for seconds in level["ttfts"]],
        "mean_itl_ms": [(1e3 * sum(gaps), float(len(gaps))) for gaps in level["itls"]],
    }
    if level["output_throughput"] is not None:
        yield Compared(of, "output tokens/s", Interval(level["output_throughput"]))
    if level["request_goodput"] is not None:
        yield Compared(of, "goodput requests/s", Interval(level["request_goodput"]))
    for key, parts in by_request.items():
        if key in intervals:
            well = zip(names, parts, is_well, strict=True)
            kept = {name: part for name, part, is_kept in well if is_kept}
            figure = f"{key.split('_')[1].upper()} ms, mean"
            yield Compared(of, figure, Interval(**intervals[key]), False, kept)
    for key in ("p99_ttft_ms", "p99_itl_ms", "p99_e2el_ms"):
        if level[key] is not None:
            figure = f"{key.split('_')[1].upper()} ms, p99"
            yield Compared(of, figure, Interval(level[key]), is_higher_better=False)


def _answers(level: Level) -> tuple[list[str], list[float]]:
    return level["errors"], level["ttfts"]


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    levels, settings = data["levels"], data["settings"]
    where = settings["url"] or "a server of its own on this machine"
    yield f"{where}; {settings['asked']}"
    if not levels:
        yield "nothing was measured"
        return
    for label, load in data["knees"].items():
        yield _knee_line(label, load, unit(levels), by_label(levels)[label])
    for label, gain in data["gains"].items():
        yield _gain_line(label, gain["crossover"], unit(levels))
    if settings["goals"]:
        yield f"goodput counts answers with {settings['goals']}"
    if any(level["completed"] and level["output_throughput"] is None for level in levels):
        yield "the server gives no token counts, so there are no rates of tokens"
    if any(level["num_without_counts"] for level in levels):
        yield "ITL is missing where the server does not count tokens as it sends them"
    if refused := levels[0]["refused_fields"]:
        yield f"the server refuses {', '.join(refused)}, so requests went without"
    yield from _warnings(levels)


def _knee_line(label: str, load: float | None, what: str, levels: Sequence[Level]) -> str:
    start = f"{label}: " if label else ""
    if load is None:
        if not any(level["completed"] and _refused(level) <= MAX_REFUSED for level in levels):
            return f"{start}no level was served well enough to look for a knee"
        return f"{start}no knee up to {_amount(levels[-1]['load'], what)}"
    found = _amount(load, what)
    return f"{start}the knee is at {found}: more load costs more time than it brings tokens"


def _gain_line(label: str, load: float | None, what: str) -> str:
    if load is None:
        return f"{label}: drafting pays at the highest load measured"
    if not load:
        return f"{label}: drafting does not pay at any load measured"
    return f"{label}: drafting pays up to about {_amount(load, what)}"


def _warnings(levels: Sequence[Level]) -> Iterator[str]:
    for level in levels:
        name = ", ".join(filter(None, (level["label"], level["level"])))
        if level["first_error"]:
            yield f"{name}: {level['failed']} failed, the first: {level['first_error']}"
        for warning in (
            level["client"]["warning"],
            level["disagreement"],
            level["stopped"],
        ):
            if warning:
                yield f"{name}: {warning}"
    shares = [level["prefix_hit_share"] or 0.0 for level in levels]
    if max(shares) - min(shares) > 0.1:
        yield (
            f"between {min(shares):.0%} and {max(shares):.0%} of the prompts' tokens were cached: "
            "times to the first token cannot be compared between levels"
        )


def _tables(data: Mapping[str, Any]) -> Iterator[Table]:
    levels = data["levels"]
    if not levels:
        return
    rows = [level for own in by_label(levels).values() for level in own]
    yield _throughput(rows, data)
    yield _latencies(rows, data)
    if any(level["counted_by_server"] for level in rows):
        yield _agreement(rows, data)
    if data["gains"]:
        loads = sorted({level["load"] for level in levels})
        found = {label: dict(gain["by_load"]) for label, gain in data["gains"].items()}
        yield Table(
            "gain",
            (_head(levels), *found),
            [(f"{load:g}", *(gain.get(load) for gain in found.values())) for load in loads],
            "output tokens/s over those without drafts:",
        )


def _heads(rows: Sequence[Level], data: Mapping[str, Any]) -> tuple[list[str], list[list[object]]]:
    """The columns by which a row is known; a series is only named where there are several."""
    is_swept = len(data["knees"]) > 1 or any(data["knees"])
    heads = [*(["setting"] if is_swept else []), _head(rows)]
    return heads, [
        [*([level["label"]] if is_swept else []), f"{level['load']:g}"] for level in rows
    ]


def _throughput(rows: Sequence[Level], data: Mapping[str, Any]) -> Table:
    heads, starts = _heads(rows, data)
    columns = {
        "requests/s": "request_throughput",
        "good/s": "request_goodput",
        "output tokens/s": "output_throughput",
        "all tokens/s": "total_token_throughput",
        "tokens/step": "tokens_per_step",
        "sent": "num_prompts",
        "completed": "completed",
        "overloaded": "overloaded",
        "failed": "failed",
        "peak": "max_concurrent_requests",
        "cost/M": "cost_per_million_output_tokens",
    }
    kept = {
        head: key for head, key in columns.items() if any(level[key] is not None for level in rows)
    }
    knees = ["knee" if data["knees"][row["label"]] == row["load"] else "" for row in rows]
    return Table(
        "levels",
        (*heads, *kept, ""),
        [
            (*start, *(level[key] for key in kept.values()), mark)
            for start, level, mark in zip(starts, rows, knees, strict=True)
        ],
        "rates over the time that is counted, of all requests; counted requests:",
    )


def _latencies(rows: Sequence[Level], data: Mapping[str, Any]) -> Table:
    heads, starts = _heads(rows, data)
    names = {"TTFT": "ttft", "ITL": "itl", "TPOT": "tpot", "E2E": "e2el"}
    figures = [(f"{name} {p}", f"{p}_{key}_ms") for name, key in names.items() for p in _PERCENTS]
    return Table(
        "times",
        (*heads, *(head for head, _ in figures)),
        [
            (*start, *(level[key] for _, key in figures))
            for start, level in zip(starts, rows, strict=True)
        ],
        "milliseconds from sending to the first token, between tokens, per token after the first, "
        "to the end:",
    )


_PERCENTS = ("p50", "p90", "p99")


def _agreement(rows: Sequence[Level], data: Mapping[str, Any]) -> Table:
    heads, starts = _heads(rows, data)
    counts = ("requests", "prompt_tokens", "output_tokens")
    times = ("mean_ttft_ms", "mean_itl_ms", "mean_e2el_ms")
    cells = []
    for start, level in zip(starts, rows, strict=True):
        server, client = level["counted_by_server"], level["counted_by_client"]
        if server is not None:
            found = [side.get(key) for key in (*counts, *times) for side in (server, client)]
            cells.append((*start, *found))
    columns = ("requests", "prompt", "output", "TTFT", "ITL", "E2E")
    sides = [f"{column} {side}" for column in columns for side in ("server", "client")]
    return Table(
        "agreement",
        (*heads, *sides),
        cells,
        "what the server's /metrics and this client counted, warm-up included; means in "
        "milliseconds:",
    )
