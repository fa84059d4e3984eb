"""Kernels against the device's own ceilings: right first, then how far from the floor.

Runs as `specdec bench kernels`, or without the command line's packages as
`python -m specdec.evals.kernel.bench --out FOLDER`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from specdec.errors import UsageError
from specdec.evals.kernel import forward as kernel_forward
from specdec.evals.kernel.case import KernelCase, Place, accuracy
from specdec.evals.kernel.cases import cpu_cases, gpu_cases
from specdec.evals.kernel.tables import render
from specdec.evals.kernel.timer import Ceilings, CudaTimer, HostTimer, Timer, measure_ceilings
from specdec.evals.report.progress import Advance, progress
from specdec.row_invariance import PINNED_ROWS

NO_GPU = "no CUDA device: the PyTorch references on the CPU; nothing here is about the kernels"
NO_PLOT = "no plot: matplotlib is not installed; pip install 'specdec-server[evals]'"
FOOTPRINT = 4  # times the last cache: what a case's inputs fill together
FORWARD_ROWS = (1, 16, 64, 256)
FORWARD_CONTEXT = 2048
FORWARD_MAX_LEN = 4096
ENGINE_STEPS = 64
MODES: Mapping[str, int | None] = {"fast": None, "deterministic": PINNED_ROWS}  # row tiles

WANTED_ONE_ROW = 1.33  # time of one row / (weight bytes / copy bandwidth)
WANTED_ROWS = {16: 1.05, 64: 1.15, 256: 1.6}  # time of n rows / time of one
WANTED_ENGINE_MS = 0.3  # of a step beside its forward


class WrongResult(Exception):
    """A case's result is further from the exact one than it may be; it is not timed."""


def run(out: Path, *, is_quick: bool, as_json: bool) -> int:
    """Measure, write kernels.json and roofline.png to `out`, print. Returns the exit code.

    Raises UsageError, before anything is measured, if `out` cannot take the files.
    """
    _check_writable(out, "kernels.json", "roofline.png")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        print(NO_GPU, file=sys.stderr if as_json else sys.stdout, flush=True)
    report = measure(device, is_quick=is_quick)
    report["plot"] = _plot(report, out / "roofline.png")
    text = json.dumps(report, indent=1, allow_nan=False)
    (out / "kernels.json").write_text(text + "\n", encoding="utf-8")
    print(text if as_json else render(report))
    return 1 if report["num_failed"] else 0


def _check_writable(folder: Path, *names: str) -> None:
    """Minutes of measuring must not be lost to a folder that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / name).open("ab").close()
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from None


def _plot(report: Mapping[str, Any], path: Path) -> str:
    """The plot's path, or why there is none."""
    try:
        from specdec.evals.kernel.plots import roofline
    except ImportError:
        return NO_PLOT
    roofline(report, path)
    return str(path)


def measure(device: torch.device, *, is_quick: bool) -> dict[str, Any]:
    """Ceilings, all cases, and on a GPU the forward and the engine's step."""
    started = time.perf_counter()
    torch.manual_seed(0)
    is_cuda = device.type == "cuda"
    timer: Timer = CudaTimer(device) if is_cuda else HostTimer()
    cases = gpu_cases(is_quick=is_quick) if is_cuda else cpu_cases(is_quick=is_quick)
    dtype = torch.bfloat16 if is_cuda else torch.float32
    modes = (["fast"] if is_quick else list(MODES)) if is_cuda else []
    rows = FORWARD_ROWS[:2] if is_quick else FORWARD_ROWS
    num_forwards = len(modes) * len(rows)
    with progress(1 + len(cases) + num_forwards + bool(modes)) as advance:
        advance("ceilings")
        ceilings = measure_ceilings(
            timer,
            device,
            copied_bytes=2**30 if is_cuda else 2**27,
            gemm_size=8192 if is_cuda else 1024,
            dtype=dtype,
        )
        _free(device)
        place = Place(device, uses_kernels=is_cuda, footprint=FOOTPRINT * timer.cache_bytes)
        measured = measure_cases(cases, place, timer, ceilings, advance)
        forwards: list[dict[str, Any]] = []
        engine: dict[str, Any] | None = None
        for mode in modes:
            part, steps = measure_model(mode, rows, device, timer, ceilings, advance)
            forwards += part
            engine = steps or engine
    return {
        "notice": None if is_cuda else NO_GPU,
        "machine": machine(device),
        "is_quick": is_quick,
        "ceilings": {
            "copy_bytes_per_second": ceilings.copy_rate,
            "gemm_flops_per_second": ceilings.gemm_rate,
            "gemm_dtype": str(dtype).removeprefix("torch."),
        },
        "cases": measured,
        "forwards": forwards,
        "engine": engine,
        "wanted": wanted(forwards, engine),
        "num_failed": sum(
            item["problem"] is not None
            for item in (*measured, *forwards, *([engine] if engine else []))
        ),
        "seconds": round(time.perf_counter() - started, 1),
    }


def measure_cases(
    cases: Sequence[KernelCase],
    place: Place,
    timer: Timer,
    ceilings: Ceilings,
    advance: Advance = lambda name: None,
) -> list[dict[str, Any]]:
    """One row per case; a case that fails is a row with a problem, and the next one runs."""
    rows = []
    for case in cases:
        advance(f"{case.op} {case.label}")
        row = dict.fromkeys(
            ("bytes", "flops", "floor_s", "error", "bound", "num_sets", "is_from_memory",
             "seconds", "ratio", "percent_of_ceiling", "problem")
        )  # fmt: skip
        rows.append({"op": case.op, "label": case.label, **row})
        try:
            _measure_case(case, place, timer, ceilings, rows[-1])
        except Exception as error:
            rows[-1]["problem"] = one_line(error)
        _free(place.device)
    return rows


def _measure_case(
    case: KernelCase, place: Place, timer: Timer, ceilings: Ceilings, row: dict[str, Any]
) -> None:
    """Fill in a case's row as far as it gets."""
    floor = ceilings.floor(case.num_bytes, case.num_flops)
    row |= {"bytes": case.num_bytes, "flops": case.num_flops, "floor_s": floor}
    prepared = case.prepare(place)
    found = accuracy(prepared)
    row |= {"error": _finite(found.error), "bound": _finite(found.bound)}
    if not found.is_ok:
        raise WrongResult(f"error {found.error:.3g}, at most {found.bound:.3g} is right")
    num_sets = len(prepared.calls)
    seconds = timer.seconds(prepared.calls)
    row |= {
        "num_sets": num_sets,
        "is_from_memory": num_sets * case.num_bytes >= 2 * timer.cache_bytes,
        "seconds": seconds,
        "ratio": seconds / floor,
        "percent_of_ceiling": 100 * floor / seconds,
    }


def measure_model(
    mode: str,
    rows: Sequence[int],
    device: torch.device,
    timer: Timer,
    ceilings: Ceilings,
    advance: Advance = lambda name: None,
    *,
    config: Mapping[str, Any] = kernel_forward.LLAMA_8B,
    dtype: torch.dtype = torch.bfloat16,
    context: int = FORWARD_CONTEXT,
    max_len: int = FORWARD_MAX_LEN,
    num_steps: int = ENGINE_STEPS,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The forward's row per number of rows, and in fast mode the engine's step."""
    floor = kernel_forward.weight_bytes(config, dtype.itemsize) / ceilings.copy_rate
    forwards: list[dict[str, Any]] = []
    engine: dict[str, Any] | None = None
    model, problem = None, None
    try:
        model = kernel_forward.random_model(
            config, dtype=dtype, device=device, max_len=max_len, row_tile=MODES[mode]
        )
    except Exception as error:
        problem = one_line(error)
    for count in rows:
        advance(f"forward {mode}, {count} rows")
        row: dict[str, Any] = {"mode": mode, "rows": count, "seconds": None, "problem": problem}
        forwards.append(row)
        if model is not None:
            try:
                row["seconds"] = kernel_forward.forward_seconds(
                    model, timer, context=context, nodes=count
                )
                row["ratio_to_weights"] = row["seconds"] / floor
            except Exception as error:
                row["problem"] = one_line(error)
            _free(device)
    if mode == "fast":
        advance("engine")
        engine = {"other_ms": None, "problem": problem}
        if model is not None:
            try:
                steps = kernel_forward.engine_steps(
                    model, timer, prompt_len=context, num_steps=num_steps
                )
                engine |= {
                    "other_ms": 1e3 * steps.other_seconds,
                    "num_steps": len(steps.rows),
                    "rows": list(steps.rows),
                    "step_ms": [1e3 * s for s in steps.step_seconds],
                    "forward_ms": [1e3 * s for s in steps.forward_seconds],
                }
            except Exception as error:
                engine["problem"] = one_line(error)
    del model
    _free(device)
    return forwards, engine


def wanted(
    forwards: Sequence[Mapping[str, Any]], engine: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """What was wanted beside what was measured; nothing where nothing was measured."""
    lines = []

    def compare(name: str, goal: float, measured: float) -> None:
        is_met = measured <= goal
        lines.append({"name": name, "wanted": goal, "measured": measured, "is_met": is_met})

    one_row = {row["mode"]: row["seconds"] for row in forwards if row["rows"] == 1}
    for row in forwards:
        mode, count, seconds = row["mode"], row["rows"], row["seconds"]
        if seconds is None:
            continue
        if count == 1:
            name = f"{mode} forward of 1 row / reading the weights"
            compare(name, WANTED_ONE_ROW, row["ratio_to_weights"])
        elif one_row.get(mode) and count in WANTED_ROWS:
            name = f"{mode} forward of {count} rows / of 1 row"
            compare(name, WANTED_ROWS[count], seconds / one_row[mode])
    if engine is not None and engine["other_ms"] is not None:
        compare("engine step beside its forward, ms", WANTED_ENGINE_MS, engine["other_ms"])
    return lines


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers are from, and when."""
    is_cuda = device.type == "cuda"
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else f"CPU ({capability})",
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
        "versions": {name: _version(name) for name in ("specdec-server", "torch", "triton")},
    }


def one_line(error: Exception) -> str:
    """An error as its kind and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else 'no message'}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a checkout
        return None


def _finite(number: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return number if math.isfinite(number) else None


def _free(device: torch.device) -> None:
    """Give back what the last case held; after a device's error nothing can be given back."""
    if device.type == "cuda":
        gc.collect()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def main() -> None:
    """The command without the command line's packages."""
    parser = argparse.ArgumentParser(prog="python -m specdec.evals.kernel.bench")
    parser.add_argument("--out", type=Path, default=Path("kernel-bench"), help="folder to write to")
    parser.add_argument("--quick", action="store_true", help="a tenth of the cases")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    try:
        sys.exit(run(options.out, is_quick=options.quick, as_json=options.json))
    except UsageError as error:
        sys.exit(f"specdec: {error}")


if __name__ == "__main__":
    main()
