"""KernelTable: a kernel measurement's report in at most forty lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_FAILURES = 8  # listed by name


def render(report: Mapping[str, Any]) -> str:
    """Machine and ceilings, a line per op with its best and worst case, failures, and the goals."""
    machine, ceilings = report["machine"], report["ceilings"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v is not None)
    lines = [
        f"{machine['device']}, {machine['date']}, {versions}; {report['seconds']} s",
        f"copy {rate(ceilings['copy_bytes_per_second'], 'B/s')}, "
        f"{ceilings['gemm_dtype']} product {rate(ceilings['gemm_flops_per_second'], 'FLOP/s')}",
        "ratio = time / max(bytes / copy, flops / product)",
        f"plot: {report['plot']}" if report["plot"].endswith(".png") else report["plot"],
    ]
    lines += _op_lines(report["cases"])
    lines += _failure_lines(report)
    if report["wanted"]:
        lines.append(f"{'':<52}{'wanted':>8}{'measured':>10}")
        lines += [
            f"{line['name']:<52}{line['wanted']:>8.2f}{line['measured']:>10.2f}"
            f"  {'met' if line['is_met'] else 'not met'}"
            for line in report["wanted"]
        ]
    return "\n".join(lines)


def rate(per_second: float, unit: str) -> str:
    """Example: `rate(4.21e12, "B/s") == "4.21 TB/s"`."""
    scale, prefix = (1e12, "T") if per_second >= 1e12 else (1e9, "G")
    return f"{float(f'{per_second / scale:.3g}'):g} {prefix}{unit}"


def _op_lines(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Best and worst ratio of each op, with the case that gave it."""
    yield f"{'op':<30}{'right':>7}  best ratio, worst ratio"
    for op in dict.fromkeys(case["op"] for case in cases):
        own = [case for case in cases if case["op"] == op]
        timed = sorted((c for c in own if c["ratio"] is not None), key=lambda c: float(c["ratio"]))
        num_right = sum(case["problem"] is None for case in own)
        ends = [f"{c['ratio']:.2f} ({c['label']})" for c in (timed[:1] + timed[-1:])]
        yield f"{op:<30}{f'{num_right}/{len(own)}':>7}  {', '.join(ends[: len(timed)])}"


def _failure_lines(report: Mapping[str, Any]) -> Iterator[str]:
    problems = [
        *((f"{c['op']}, {c['label']}", c["problem"]) for c in report["cases"]),
        *((f"{f['mode']} forward, {f['rows']} rows", f["problem"]) for f in report["forwards"]),
        *((("engine step", report["engine"]["problem"]),) if report["engine"] else ()),
    ]
    failed = [(name, problem) for name, problem in problems if problem is not None]
    for name, problem in failed[:MAX_FAILURES]:
        yield f"failed: {name}: {problem}"
    if len(failed) > MAX_FAILURES:
        yield f"failed: {len(failed) - MAX_FAILURES} more, see kernels.json"
