"""LatencyReport: a latency measurement for the terminal and for a folder of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specdec.evals.latency.side import OURS, PLAIN
from specdec.evals.latency.step_clock import PARTS
from specdec.evals.report.report import Report
from specdec.evals.report.spread import PERCENTS
from specdec.evals.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Data = Mapping[str, Any]
_PERCENTS = [f"p{percent}" for percent in PERCENTS]
SHOWN_PARTS = (*PARTS, "rest", "deliver")  # in the order in which they happen


def latency_report(data: Data) -> Report:
    """What `specdec bench latency` shows and writes.

    data: origin and summary. Example: `print(latency_report(data).text())`.
    """
    return Report(
        "latency",
        "Latency of one stream",
        data,
        tuple(_lines(data)),
        (_steps(data), _breakdown(data), _answers(data), _times(data), _ratios(data)),
        _figures(data),
    )


def short(contender: str) -> str:
    """A contender's name in a head or a plot. Example: `short("specdec, ngram") == "ngram"`."""
    return contender.removeprefix(OURS)


def _lines(data: Data) -> Iterator[str]:
    target, bandwidth, settings = data["target"], data["bandwidth"], data["settings"]
    yield (
        f"{target['model']}, weights {target['weights']}, KV cache {target['kv']}, "
        f"{target['backend']}, {target['threads']} threads"
    )
    best, median = (bandwidth[name] / 1e9 for name in ("best", "median"))
    weight_bytes = target["weight_bytes"]
    yield f"memory reads {best:.1f} GB/s at best, {median:.1f} GB/s in the median pass"
    yield (
        f"floor: {weight_bytes / 1e6:.0f} MB of weights / {best:.1f} GB/s "
        f"= {1e3 * weight_bytes / bandwidth['best']:.2f} ms a step"
    )
    plain = next((cell for cell in data["steps"] if cell["rows"] == 1), None)
    if plain is not None:
        yield (
            f"a step of 1 row at {plain['context']} tokens of context takes "
            f"{plain['step_ms']['p50']:.2f} ms: reading weights and cache is "
            f"{100 * plain['floor_share']:.0f} % of it"
        )
    yield from _memory(data["memory"])
    streams, prefill = data["streams"], data["prefill"]
    yield (
        f"{streams['num_streams']} streams {streams['many']} tokens/s, "
        f"one {streams['one']}: {streams['ratio']}x"
    )
    for name, seconds in prefill["seconds"].items():
        ratio = prefill["ratios"].get(f"{PLAIN.name} / {name}")
        yield (
            f"{prefill['num_tokens']} tokens of prompt: {name} {seconds:.3f} s"
            f"{'' if ratio is None else f', {ratio}x ours'}"
        )
    how = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    yield f"answers: {how}, {settings['samples']} prompts, {settings['rounds']} rounds in turn"
    for name, times in data["contenders"].items():
        if times["num_prefix_hit"]:
            yield f"not alike: {name} found {times['num_prefix_hit']} prompt tokens in a cache"


def _memory(memory: Data) -> Iterator[str]:
    sizes = ("peak", "start", "weight", "rest", "kv_cache")
    peak, start, weights, rest, kv = (f"{memory[f'{of}_bytes'] / 1e6:.0f}" for of in sizes)
    yield (
        f"peak memory of one engine {peak} MB: {start} before it was loaded, {weights} of weights, "
        f"{rest} of KV cache in use (of {kv} reserved) and the rest"
    )
    stages = [f"{s['after']}: {s['resident_bytes'] / 1e6:.0f}" for s in memory["stages"]]
    yield f"resident MB at most, as contenders join: {'; '.join(stages)}"


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


def _breakdown(data: Data) -> Table:
    by_name = {name: medians for name, medians in data["breakdown"].items() if medians}
    parts = [*SHOWN_PARTS, "step", "rows", "steps"] if by_name else []  # one token: no such step
    return Table(
        "breakdown",
        ("part", *map(short, by_name)),
        [(part, *(medians[part] for medians in by_name.values())) for part in parts],
        "where a decode step's ms go (medians); delivery comes after the step and is not in it",
    )


def _answers(data: Data) -> Table:
    return Table(
        "answers",
        (
            *("prompt", "contender", "tokens/s", "min", "max"),
            *("decode/s", "tokens", "per step", "equal"),
        ),
        [
            (
                *(prompt, name, row["tokens_per_second"], row["min"], row["max"]),
                *(row["decode_tokens_per_second"], summary["num_tokens"]),
                *(row["tokens_per_step"], row["num_equal"]),
            )
            for prompt, summary in data["prompts"].items()
            for name, row in summary["contenders"].items()
        ],
        "end to end, prompt included; decode: after the first token; "
        "equal: tokens before the first that differs",
    )


def _times(data: Data) -> Table:
    kinds = ("ttft", "step", "token")
    return Table(
        "times",
        ("prompt", "contender", *(name for kind in kinds for name in _names(kind))),
        [
            (
                *(prompt, name),
                *(
                    None if row[f"{kind}_ms"] is None else row[f"{kind}_ms"][p]
                    for kind in kinds
                    for p in _PERCENTS
                ),
            )
            for prompt, summary in data["prompts"].items()
            for name, row in summary["contenders"].items()
        ],
        "ms to the first token, between arrivals, and per token (a step's time over its tokens)",
    )


def _ratios(data: Data) -> Table:
    own = [name for name in data["contenders"] if name.startswith(OURS)]
    rows: list[tuple[object, ...]] = []
    for prompt, summary in data["prompts"].items():
        ratios = summary["ratios"]
        others = dict.fromkeys(name.split(" / ")[1] for name in ratios)
        for other in others:
            label = other
            if other in summary["best"]:
                label = f"{other}, best: {summary['best'][other].partition('=')[2]}"
            rows.append((prompt, label, *(ratios.get(f"{name} / {other}") for name in own)))
    return Table(
        "ratios",
        ("prompt", "against", *map(short, own)),
        rows,
        "speed end to end over that of another, the median of each round's ratio",
    )


def _names(kind: str) -> list[str]:
    return [f"{kind}{percent}" for percent in PERCENTS]


def _figures(data: Data) -> dict[str, Callable[[], Figure]]:
    def drawn(name: str) -> Callable[[], Figure]:
        def draw() -> Figure:
            from specdec.evals.latency import plots

            return plots.FIGURES[name](data)

        return draw

    return {name: drawn(name) for name in ("steps", "breakdown", "times", "speed")}
