"""LatencyTable: a latency report for the terminal, section by section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.evals.report.machine import machine_line
from specdec.evals.report.tables import table


def render(report: Mapping[str, Any]) -> str:
    """Machine and bandwidth, steps, breakdown, streams, end to end; at most 80 columns or so."""
    sections = (_machine, _steps, _breakdown, _streams, _answers)
    return "\n\n".join("\n".join(section(report)) for section in sections)


def _machine(report: Mapping[str, Any]) -> Iterator[str]:
    machine, target, bandwidth = report["machine"], report["target"], report["bandwidth"]
    yield machine_line(machine)
    yield (
        f"{target['model']}, weights {target['weights']}, KV cache {target['kv']}, "
        f"{target['backend']}, {target['threads']} threads; {report['date']}"
    )
    best, median = (bandwidth[name] / 1e9 for name in ("best", "median"))
    weight_bytes = target["weight_bytes"]
    yield f"memory reads {best:.1f} GB/s at best, {median:.1f} GB/s in the median pass"
    yield (
        f"floor: {weight_bytes / 1e6:.0f} MB of weights / {best:.1f} GB/s "
        f"= {1e3 * weight_bytes / bandwidth['best']:.2f} ms a step"
    )


def _steps(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (
            cell["context"],
            cell["rows"],
            *(f"{cell['forward_ms'][p]:.2f}" for p in ("p50", "p90", "p99")),
            *(f"{cell['step_ms'][p]:.2f}" for p in ("p50", "p90", "p99")),
            f"{cell['forward_per_floor']:.2f}",
            f"{cell['step_per_floor']:.2f}",
            f"{cell['step_per_floor_with_kv']:.2f}",
        )
        for cell in report["steps"]
    ]
    yield "forward and engine step in ms; ratios to the floor, the last with the context's KV"
    columns = "context rows fwd50 fwd90 fwd99 step50 step90 step99 fwd/fl step/fl /fl+KV"
    yield from table(columns.split(), rows)


def _breakdown(report: Mapping[str, Any]) -> Iterator[str]:
    by_name = report["breakdown"]
    yield "where a decode step's ms go (medians; delivery comes after the step)"
    names = [name for name, medians in by_name.items() if medians]  # one token takes no such step
    parts = by_name[names[0]] if names else ()
    yield from table(
        ["part", *names],
        [(part, *(f"{by_name[name][part]:g}" for name in names)) for part in parts],
    )


def _streams(report: Mapping[str, Any]) -> Iterator[str]:
    streams, prefill = report["streams"], report["prefill"]
    yield (
        f"{streams['num_streams']} streams {streams['many']} tokens/s, "
        f"one {streams['one']}: {streams['ratio']}x"
    )
    for name, seconds in prefill["seconds"].items():
        ratio = prefill["ratios"].get(f"{next(iter(prefill['seconds']))} / {name}")
        yield (
            f"{prefill['num_tokens']} tokens of prompt: {name} {seconds:.3f} s"
            f"{'' if ratio is None else f', {ratio}x ours'}"
        )


def _answers(report: Mapping[str, Any]) -> Iterator[str]:
    yield "end to end, prompt included; equal = tokens before the first that differs"
    yield from table(
        ["prompt", "contender", "tokens/s", "min", "max", "tokens", "per step", "equal"],
        [
            (
                *(prompt, name, row["tokens_per_second"], row["min"], row["max"]),
                *(summary["num_tokens"], row["tokens_per_step"], row["num_equal"]),
            )
            for prompt, summary in report["prompts"].items()
            for name, row in summary["contenders"].items()
        ],
    )
    for prompt, summary in report["prompts"].items():
        for name, value in summary["ratios"].items():
            yield f"{prompt}: {name} = {value}x"
