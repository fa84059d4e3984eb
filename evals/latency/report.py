"""LatencyReport: a latency measurement for the terminal and for a folder of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec.evals.latency.side import PLAIN
from specdec.evals.latency.tables import details, shown_first
from specdec.evals.report.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Data = Mapping[str, Any]


def latency_report(data: Data) -> Report:
    """What `specdec bench latency` shows and writes.

    data: origin and summary. Example: `print(latency_report(data).text())`.
    """
    return Report(
        "latency",
        "Latency of one stream",
        data,
        tuple(_lines(data)),
        shown_first(data),
        _figures(data),
        details(data),
    )


def _lines(data: Data) -> Iterator[str]:
    target, settings = data["target"], data["settings"]
    yield (
        f"{target['model']}, weights {target['weights']}, KV cache {target['kv']}, "
        f"{target['backend']}, {target['threads']} threads"
    )
    chosen = data["chosen"][settings["ours"]]
    why = f" ({chosen['reason']})" if chosen["reason"] else ""
    yield (
        f"ours is {settings['ours']}: drafter {chosen['drafter']}, at most {chosen['node_budget']} "
        f"nodes, {chosen['control']}{why}"
    )
    if "steps" in data:
        yield from _basics(data)
    yield from _memory(data["memory"])
    for found in data["temperatures"]:
        how = f"temperature {found['temperature']:g}" if found["temperature"] else "greedy"
        tokens = sum(task["num_tokens"] for task in found["tasks"].values())
        yield (
            f"answers: {how}, {settings['samples']} prompts, "
            f"{tokens / settings['samples']:.0f} tokens in the mean, "
            f"{settings['rounds']} rounds in turn"
        )
        for name, times in found["contenders"].items():
            if times["num_prefix_hit"]:
                yield f"not alike: {name} found {times['num_prefix_hit']} prompt tokens in a cache"


def _basics(data: Data) -> Iterator[str]:
    bandwidth, weight_bytes = data["bandwidth"], data["target"]["weight_bytes"]
    best, median = (bandwidth[name] / 1e9 for name in ("best", "median"))
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


def _memory(memory: Data) -> Iterator[str]:
    sizes = ("peak", "start", "weight", "rest", "kv_cache")
    peak, start, weights, rest, kv = (f"{memory[f'{of}_bytes'] / 1e6:.0f}" for of in sizes)
    yield (
        f"peak memory of one engine {peak} MB: {start} before it was loaded, {weights} of weights, "
        f"{rest} of KV cache in use (of {kv} reserved) and the rest"
    )
    stages = [f"{s['after']}: {s['resident_bytes'] / 1e6:.0f}" for s in memory["stages"]]
    yield f"resident MB at most, as contenders join: {'; '.join(stages)}"


def _figures(data: Data) -> dict[str, Callable[[], Figure]]:
    """The picture of the claim first, then speeds, then what they are made of."""

    def draw(name: str, *arguments: Any) -> Figure:
        from specdec.evals.latency import plots

        figure: Figure = plots.FIGURES[name](data, *arguments)
        return figure

    names = ["ratios"] if any(found["ratios"] for found in data["temperatures"]) else []
    names += ["speed", *(["steps"] if "steps" in data else []), "breakdown"]
    figures: dict[str, Callable[[], Figure]] = {name: partial(draw, name) for name in names}
    for found in data["temperatures"]:
        figures[f"times-{found['temperature']:g}"] = partial(draw, "times", found)
    return figures
