"""Ahead-of-time compilation: what is reported of kernels, good and bad, and that ours are good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.kernels import aot
from specdec.kernels.variant import Variant

ALL = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")

KERNELS = """
import os
import triton
import triton.language as tl
from specdec.kernels.variant import Variant

@triton.jit
def _double(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, 2 * tl.load(x + i, i < n), i < n)

@triton.jit
def _hoard(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tile = tl.load(x + i[:, None] * n + i[None, :])
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(n):
        total += tile * tl.exp(total + tl.load(x + k * n + i)[:, None])
    tl.store(x + i[:, None] * n + i[None, :], total)

@triton.jit
def _products(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    places = x + i[:, None] * BLOCK + i[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(n):
        total += tl.dot(tl.load(places + k * BLOCK), tl.load(places + 7 * k * BLOCK))
    tl.store(places, total)

@triton.jit
def _add_pointer(x, y):
    return x + y

@triton.jit
def _mistyped(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, _add_pointer(tl.load(x + i), x))

@triton.jit
def _unknown_instruction(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    y = tl.inline_asm_elementwise("bogus $0, $1;", "=r,r", [tl.load(x + i)], tl.float32, True, 1)
    tl.store(x + i, y)

FEW = {"maxnreg": 40, "amd": {"waves_per_eu": 8}}  # 40 and 64 registers

class Fatal(dict):
    def __iter__(self):
        os._exit(1)

def variant(name, kernel, block, is_hot=True, amd={}, targets=(), **options):
    return Variant(
        name, kernel, {"x": "*fp32", "n": "i32"}, {"BLOCK": block}, options, amd,
        multiples_of_16=("n",), is_hot=is_hot, targets=targets,
    )
"""

GOOD = 'yield variant("double", _double, 128, num_warps=1)'
FATAL = 'yield Variant("fatal", _double, Fatal(x="*fp32", n="i32"), {"BLOCK": 128})'
BAD = """
    yield variant("hoard hot", _hoard, 64, num_warps=1, **FEW)
    yield variant("hoard", _hoard, 64, is_hot=False, num_warps=1, **FEW)
    yield variant("mistyped", _mistyped, 128)
    yield variant("unknown instruction", _unknown_instruction, 128)
    yield variant("products", _products, 64, num_stages=5)
    yield variant("crowd", _double, 4096, num_warps=64)
    yield variant("crowd on AMD", _double, 4096, num_warps=4, amd={"num_warps": 32})
    yield variant("double on CDNA", _double, 128, targets=("gfx942", "sm_120"))
    yield Variant("no type", _double, {"x": "*fp32"}, {"BLOCK": 128})
    signature = {"x": "*fp32", "n": "i32"}
    yield Variant("no such argument", _double, signature, {"BLOCK": 4}, multiples_of_16=("m",))
"""
DRIVER = """
import sys
from specdec.kernels import aot
from specdec.cli import main
aot.MODULES = tuple(sys.argv.pop(1).split(","))
main()
"""


def write(folder: Path, module: str, *yields: str) -> None:
    body = "".join(f"\n    {text}" for text in yields)
    (folder / f"{module}.py").write_text(f"{KERNELS}\ndef variants():{body}\n")


def run(
    *command: str, folder: Path | None = None, **more: str | None
) -> subprocess.CompletedProcess[str]:
    """A Python process in which modules of `folder` can be imported; None unsets a variable."""
    names = {**os.environ, "TRITON_INTERPRET": None, **more}
    if folder is not None:
        names |= {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-P", *command],
        capture_output=True,
        text=True,
        env={name: value for name, value in names.items() if value is not None},
    )


def compile_toys(
    folder: Path, *arguments: str, modules: str = "toys", **more: str | None
) -> subprocess.CompletedProcess[str]:
    arguments = ("-c", DRIVER, modules, "kernels", "compile", *arguments)
    return run(*arguments, folder=folder, **more)


@pytest.fixture(scope="module")
def bad_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Good and bad variants in one run, for two kinds of target, with a compiler that dies."""
    folder = tmp_path_factory.mktemp("toys")
    write(folder, "toys", FATAL, GOOD, BAD.strip())
    targets = ("--target", "sm_80", "--target", "gfx942", "--target", "sm_80")
    done = compile_toys(folder, *targets, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def problems(report: dict[str, Any], name: str) -> list[str | None]:
    """Of a variant on sm_80 and gfx942, each at most one line."""
    rows = [row for row in report["variants"] if row["name"] == name]
    assert [row["target"] for row in rows] == ["sm_80", "gfx942"]
    assert not any("\n" in (row["problem"] or "") for row in rows)
    return [row["problem"] for row in rows]


def test_every_result_is_there_in_order(bad_report: dict[str, Any]) -> None:
    names = list(dict.fromkeys(row["name"] for row in bad_report["variants"]))
    assert names[:4] == ["fatal", "double", "hoard hot", "hoard"]
    assert len(bad_report["variants"]) == 2 * len(names) - 1 == 23
    assert [row["target"] for row in bad_report["variants"][:4]] == ["sm_80", "gfx942"] * 2
    elsewhere = [row for row in bad_report["variants"] if row["name"] == "double on CDNA"]
    assert [row["target"] for row in elsewhere] == ["gfx942"]
    good = [row for row in bad_report["variants"] if row["problem"] is None]
    assert bad_report["num_compiled"] == len(good)
    assert bad_report["num_failed"] == 23 - len(good)


def test_what_dies_stops_nobody_else(bad_report: dict[str, Any]) -> None:
    assert problems(bad_report, "fatal") == ["the compiler died"] * 2
    assert problems(bad_report, "double") == [None, None]


def test_spills_fail_only_where_it_is_hot(bad_report: dict[str, Any]) -> None:
    rows = [row for row in bad_report["variants"] if row["name"].startswith("hoard")]
    spills = [row["spill_bytes"] for row in rows]
    assert all(spills)
    assert spills[:2] == spills[2:]
    hot = [f"hot, but spills {count} bytes per thread" for count in spills[:2]]
    assert problems(bad_report, "hoard hot") == hot
    assert problems(bad_report, "hoard") == [None, None]
    assert [row["registers"] for row in rows] == [40, 64] * 2  # all that FEW lets them have


def test_errors_say_why_and_where(bad_report: dict[str, Any]) -> None:
    (mistyped,) = set(problems(bad_report, "mistyped"))
    assert mistyped is not None
    assert "invalid operands of type pointer<fp32>" in mistyped
    assert mistyped.endswith("in `return x + y`")
    nvidia, amd = problems(bad_report, "unknown instruction")
    assert nvidia is not None and "Not a name of any known instruction: 'bogus'" in nvidia
    assert amd is not None and "invalid instruction" in amd
    unlike = "the variant's arguments are not the kernel's: x, n, BLOCK"
    assert problems(bad_report, "no type") == [unlike] * 2
    assert problems(bad_report, "no such argument") == [unlike] * 2


def test_what_no_block_can_hold_does_not_fit(bad_report: dict[str, Any]) -> None:
    rows = [row for row in bad_report["variants"] if row["name"] == "products"]
    fits, too_much = problems(bad_report, "products")
    assert 64 * 1024 < rows[0]["shared_bytes"] <= 163 * 1024  # four or five stages of 32 KiB
    assert fits is None
    need = rows[1]["shared_bytes"]
    assert too_much == (
        f"does not fit: needs {need} bytes of shared memory, a block of gfx942 has 65536"
    )
    threads = "does not fit: needs {} threads, a block of {} has 1024"
    want = [threads.format(2048, "sm_80"), threads.format(4096, "gfx942")]
    assert problems(bad_report, "crowd") == want
    assert problems(bad_report, "crowd on AMD") == [None, threads.format(2048, "gfx942")]


def test_limits_of_shared_memory() -> None:
    kib = {name: target.max_shared_bytes / 1024 for name, target in aot.TARGETS.items()}
    assert kib == {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}


@pytest.mark.parametrize("environment", [{}, {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "error"}])
def test_good_kernels_exit_with_0(tmp_path: Path, environment: dict[str, str]) -> None:
    """Also where the interpreter is asked for, as in these tests' own environment."""
    write(tmp_path, "toys", GOOD)
    done = compile_toys(tmp_path, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    header, *rows = [line.split() for line in done.stdout.splitlines()]
    assert header == ["variant", "target", "registers", "shared", "spills", "result"]
    assert [(row[0], row[1], row[-1]) for row in rows[:5]] == [("double", t, "ok") for t in ALL]
    assert all(0 < int(row[2]) < 255 and row[3:5] == ["0", "0"] for row in rows[:5])
    assert rows[-2][:2] == ["5", "compiled"]
    assert rows[-1] == ["0", "failed"]
    # Four numbers at a time need an aligned pointer and a mask that changes at multiples of four.
    assembly = [file.read_text() for file in (tmp_path / "cache").rglob("_double.ptx")]
    assert len(assembly) == 4
    assert all("ld.global.v4" in text and "st.global.v4" in text for text in assembly)


def test_a_bad_kernel_exits_with_1(tmp_path: Path) -> None:
    write(tmp_path, "toys", GOOD, 'yield variant("wrong [b]", _mistyped, 128)')
    done = compile_toys(tmp_path, "--target", "sm_120")
    assert (done.returncode, done.stderr) == (1, "")
    assert "wrong [b]" in done.stdout
    assert "invalid operands" in done.stdout
    assert "1 compiled" in done.stdout
    assert done.stdout.endswith("1 failed\n")


def test_usage_errors_are_one_line(tmp_path: Path) -> None:
    write(tmp_path, "toys", GOOD)
    done = compile_toys(tmp_path, "--target", "sm_90", "--target", "sm_70")
    want = f"specdec: unknown target 'sm_70'; choose from {', '.join(ALL)}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", want)
    no_triton = f"import sys; sys.modules['triton'] = None\n{DRIVER}"
    done = run("-c", no_triton, "toys", "kernels", "compile", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("specdec: compiling kernels needs triton")
    assert done.stderr.count("\n") == 1


def test_names_are_unique_and_targets_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result is known by its variant's name and target."""
    write(tmp_path, "aot_once", GOOD)
    write(tmp_path, "aot_again", GOOD)
    write(tmp_path, "aot_twice", GOOD, GOOD)
    write(tmp_path, "aot_nowhere", 'yield variant("double", _double, 128, targets=("sm_70",))')
    monkeypatch.syspath_prepend(tmp_path)
    assert [job.target for job in aot.jobs(["aot_once"], ALL)] == list(ALL)
    with pytest.raises(ValueError, match="named 'double'"):
        aot.jobs(["aot_once", "aot_again"], ALL)
    with pytest.raises(ValueError, match="named 'double'"):
        aot.jobs(["aot_twice"], ALL)
    with pytest.raises(ValueError, match="sm_70"):
        aot.jobs(["aot_nowhere"], ALL)


def test_what_is_no_compiled_kernel_is_an_error() -> None:
    variant = Variant("plain", print, {}, {})
    assert "TRITON_INTERPRET" in (aot.compile_variant(variant, aot.TARGETS["sm_90"]).error or "")


@pytest.mark.timeout(1800)  # over 7 minutes of processor time where Triton has nothing cached
def test_our_kernels_compile_for_every_target() -> None:
    """Every variant of every kernel, and none that runs in every decode step spills."""
    done = run("-m", "specdec.cli", "kernels", "compile", "--json", TRITON_INTERPRET="1")
    assert done.stderr == ""
    report = json.loads(done.stdout)
    bad = [row for row in report["variants"] if row["problem"] is not None]
    assert not bad, "\n".join(f"{row['name']} {row['target']}: {row['problem']}" for row in bad)
    assert done.returncode == 0
    assert {row["target"] for row in report["variants"]} == set(ALL)
