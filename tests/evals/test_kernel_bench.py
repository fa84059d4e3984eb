"""`specdec bench kernels`: its report, what it does with failures, and itself at work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from specdec.errors import UsageError
from specdec.evals.kernel import bench as kernel_bench
from specdec.evals.kernel import forward as kernel_forward
from specdec.evals.kernel.case import Expected, KernelCase, Place, Prepared, Results
from specdec.evals.kernel.cases import gpu_cases
from specdec.evals.kernel.row_cases import SiluMul
from specdec.evals.kernel.tables import render
from specdec.evals.kernel.timer import Ceilings, CudaTimer, HostTimer, measure_ceilings
from specdec.kernels import dispatch
from tests.kernels.device import DEVICE, needs_gpu

BF16, FP32 = torch.bfloat16, torch.float32
TIMER = HostTimer(cache_bytes=1024, most_seconds=0.0)
CEILINGS = Ceilings(1e9, 1e12)


@dataclass(frozen=True)
class Broken:
    """A case that raises, of many lines."""

    op: str = "broken"
    label: str = "1 x 1"
    num_bytes: int = 8
    num_flops: int = 8

    def prepare(self, place: Place) -> Prepared:
        raise RuntimeError("out of resources: shared memory\nand much more")


@dataclass(frozen=True)
class Unwritten(Broken):
    """A case whose op forgets to write its result."""

    op: str = "unwritten"

    def prepare(self, place: Place) -> Prepared:
        def run() -> Results:
            return (torch.empty(4),)

        return Prepared([run], lambda: [Expected(torch.ones(4).double(), torch.ones(4))])


@cache
def measured() -> dict[str, Any]:
    """A whole report of tiny cases on the CPU, two of them failing."""
    cases: list[KernelCase] = [Broken(), Unwritten(), SiluMul(2, 8, FP32), SiluMul(1, 8, FP32)]
    with (
        patch.object(kernel_bench, "cpu_cases", lambda is_quick: cases),
        patch.object(kernel_bench, "measure_ceilings", lambda *_, **__: CEILINGS),
    ):
        return kernel_bench.measure(torch.device("cpu"), is_quick=True)


def report(**changes: Any) -> dict[str, Any]:
    return {**measured(), "plot": "no plot", **changes}


def test_a_failing_case_is_reported_and_the_others_go_on() -> None:
    found = report()
    json.dumps(found, allow_nan=False)
    problems = [case["problem"] for case in found["cases"]]
    assert problems[0] == "RuntimeError: out of resources: shared memory"
    assert problems[1].startswith("WrongResult: error nan")
    assert problems[2:] == [None, None] and found["num_failed"] == 2
    assert found["notice"] == kernel_bench.NO_GPU
    assert (found["forwards"], found["engine"], found["wanted"]) == ([], None, [])
    text = render(found)
    assert "failed: broken, 1 x 1: RuntimeError: out of resources: shared memory" in text
    assert "2/2" in text and "0/1" in text and "wanted" not in text


def test_the_table_is_short_whatever_happens() -> None:
    found = report()
    forwards = [
        {
            "mode": mode,
            "rows": rows,
            "seconds": rows * 1e-3,
            "ratio_to_weights": 1.2,
            "problem": None,
        }
        for mode in ("fast", "deterministic")
        for rows in (1, 16, 64, 256)
    ]
    engine = {"other_ms": 0.4, "problem": None}
    cases = [
        {**found["cases"][0], "op": op} for op in {case.op for case in gpu_cases(is_quick=True)}
    ]
    found |= {
        "cases": cases * 5,
        "forwards": forwards,
        "engine": engine,
        "wanted": kernel_bench.wanted(forwards, engine),
    }
    lines = render(found).splitlines()
    assert len(lines) <= 40
    assert any("52 more" in line for line in lines)
    assert lines[-1].split()[-4:] == ["0.30", "0.40", "not", "met"]


def test_what_was_not_measured_is_not_compared() -> None:
    one = {"mode": "fast", "rows": 1, "seconds": 2.0, "ratio_to_weights": 1.3}
    many = {"mode": "fast", "rows": 16, "seconds": 2.2, "ratio_to_weights": 1.4}
    failed = {"mode": "fast", "rows": 64, "seconds": None}
    lines = kernel_bench.wanted([one, many, failed], {"other_ms": None})
    assert [(line["wanted"], line["measured"], line["is_met"]) for line in lines] == [
        (1.33, 1.3, True),
        (1.05, pytest.approx(1.1), False),
    ]
    assert kernel_bench.wanted([many], None) == []  # nothing to compare with


def test_the_plot_is_written_or_missed_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "roofline.png"
    with patch.dict(sys.modules, {"specdec.evals.kernel.plots": None}):
        assert kernel_bench._plot(report(), path) == kernel_bench.NO_PLOT
    pytest.importorskip("matplotlib")
    for cases in (report()["cases"], list[Any]()):
        assert kernel_bench._plot(report(cases=cases), path) == str(path)
        assert path.read_bytes()[:4] == b"\x89PNG"
        path.unlink()


def test_weight_bytes_are_those_of_the_model() -> None:
    """8.03 billion weights less the embedding's 525 million."""
    num_norms = 65 * 4096
    num_weights = 8_030_261_248 - 128256 * 4096 - num_norms
    config = kernel_forward.LLAMA_8B
    assert kernel_forward.weight_bytes(config, 2) == 2 * num_weights + 4 * num_norms


# --- the whole, and the forward ---


def test_without_a_gpu_it_says_so_first(tmp_path: Path) -> None:
    """The command, without what only the server and the terminal need."""
    code = f"""\
import sys
for name in ("typer", "starlette", "msgspec", "rich", "uvicorn"):
    sys.modules[name] = None
from specdec.evals.kernel import bench as kernel_bench
from specdec.evals.kernel import cases as kernel_cases
cases = kernel_cases.cpu_cases(is_quick=True)[2:4]
kernel_bench.cpu_cases = lambda is_quick: cases
sys.argv = ["kernel_bench", "--quick", "--out", {str(tmp_path / "a" / "b")!r}]
kernel_bench.main()
"""
    done = _run([sys.executable, "-P", "-c", code])
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert (
        first
        == "no CUDA device: the PyTorch references on the CPU; nothing here is about the kernels"
    )
    assert len(rest) <= 40 and rest[0].startswith("CPU")
    saved = json.loads((tmp_path / "a" / "b" / "kernels.json").read_text())
    assert [case["problem"] for case in saved["cases"]] == [None] * 2


def test_the_command_line_has_it(tmp_path: Path) -> None:
    code = """\
import sys
from specdec.evals.kernel import bench as kernel_bench
kernel_bench.cpu_cases = lambda is_quick: []
from specdec.cli import main
main()
"""
    out = ["bench", "kernels", "--json", "--out", str(tmp_path)]
    done = _run([sys.executable, "-P", "-c", code, *out])
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == kernel_bench.NO_GPU
    found = json.loads(done.stdout)
    assert found["cases"] == [] and found["ceilings"]["copy_bytes_per_second"] > 1e8


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


TINY_CONFIG = {
    **kernel_forward.LLAMA_8B,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize("mode", ["fast", "deterministic"])
def test_forward_and_engine_are_measured(mode: str) -> None:
    with (
        patch.object(dispatch, "uses_triton", lambda device: True),
        patch.dict(kernel_bench.MODES, {"deterministic": 8}),
    ):
        forwards, engine = kernel_bench.measure_model(
            mode, (1, 3), DEVICE, TIMER, CEILINGS,
            config=TINY_CONFIG, dtype=FP32, context=20, max_len=128, num_steps=3,
        )  # fmt: skip
    assert [row["problem"] for row in forwards] == [None, None]
    assert all(row["seconds"] > 0 for row in forwards)
    if mode == "deterministic":
        assert engine is None
        return
    assert engine is not None and engine["problem"] is None
    assert len(engine["step_ms"]) == len(engine["forward_ms"]) == engine["num_steps"] >= 1


def test_the_random_model_repeats_itself_so_that_the_drafter_finds_something() -> None:
    with patch.object(dispatch, "uses_triton", lambda device: True):
        model = kernel_forward.random_model(
            TINY_CONFIG, dtype=FP32, device=DEVICE, max_len=64, row_tile=None
        )
        steps = kernel_forward.engine_steps(model, TIMER, prompt_len=4, num_steps=14, node_budget=2)
    assert set(steps.rows) == {1, 3}
    differences = [a - b for a, b in zip(steps.step_seconds, steps.forward_seconds, strict=True)]
    assert min(differences) <= steps.other_seconds <= max(differences)


def test_a_model_that_does_not_fit_is_reported() -> None:
    with patch.object(kernel_forward, "random_model", side_effect=MemoryError("too large")):
        forwards, engine = kernel_bench.measure_model("fast", (1, 16), DEVICE, TIMER, CEILINGS)
    assert engine is not None
    problems = [row["problem"] for row in (*forwards, engine)]
    assert problems == ["MemoryError: too large"] * 3


@needs_gpu
def test_cuda_timer_sees_no_more_than_the_device_can_do() -> None:
    timer = CudaTimer(DEVICE)
    found = measure_ceilings(timer, DEVICE, copied_bytes=2**28, gemm_size=4096, dtype=BF16)
    assert 1e11 < found.copy_rate < 2e13 and 1e13 < found.gemm_rate < 1e16


@pytest.mark.parametrize("taken", ["", "kernels.json", "roofline.png"])
def test_a_folder_that_cannot_be_written_is_said_before_measuring(
    tmp_path: Path, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the folder's place, or a folder in a file's."""
    out = tmp_path / "out"
    if taken:
        (out / taken).mkdir(parents=True)
    else:
        out.write_text("")
    monkeypatch.setattr(kernel_bench, "measure", lambda *args, **kwargs: pytest.fail("measured"))
    with pytest.raises(UsageError, match=r"cannot write to .*out: "):
        kernel_bench.run(out, is_quick=True, as_json=False)
