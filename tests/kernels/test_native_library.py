"""The library of the C++ forward: compiled once, refused in one line, and how it packs weights."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels import native_library
from specdec.kernels.native_library import LANES, NativeUnavailable, load
from specdec.kernels.native_structs import STRUCTS, CLinear
from specdec.native_weights import FORMATS
from tests.native_oracle import GROUP, stored
from tests.native_session import native_library as shared_library

LOAD = """
import sys
from pathlib import Path
from specdec.kernels.native_library import NativeUnavailable, load
try:
    load(Path(sys.argv[1]))
    print("loaded")
except NativeUnavailable as reason:
    print("unavailable:", reason)
"""


class Compiler:
    """A compiler in name: it notes that it ran and hands out the library that the engine uses."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        library = shared_library()._name
        self._file, self._log = folder / "compiler", folder / "log"
        self._log.touch()
        self.says(f'for last; do :; done; cp "{library}" "$last"')
        monkeypatch.setenv("CXX", str(self._file))

    def says(self, script: str) -> None:
        """Run this from now on; arguments end with the file to write."""
        self._file.write_text(f'#!/bin/sh\necho run >> "{self._log}"\n{script}\n')
        self._file.chmod(0o755)

    @property
    def num_runs(self) -> int:
        return len(self._log.read_text().splitlines())


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path, monkeypatch)


def start(cache: Path) -> subprocess.Popen[str]:
    """Load in a process of its own."""
    command = [sys.executable, "-c", LOAD, str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_second_load_does_not_compile(tmp_path: Path, compiler: Compiler) -> None:
    load(tmp_path / "cache")
    compiler.says("exit 1")
    assert load(tmp_path / "cache").specdec_struct_bytes(0) == ctypes.sizeof(CLinear)
    assert compiler.num_runs == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_other_sources_and_flags_are_compiled_again(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tmp_path / "cache")
    sources = tmp_path / "sources"
    shutil.copytree(native_library.SOURCES, sources)
    monkeypatch.setattr(native_library, "SOURCES", sources)
    load(tmp_path / "cache")
    assert compiler.num_runs == 1  # the same sources elsewhere
    with (sources / "simd.hpp").open("a") as header:
        header.write("// another line\n")
    load(tmp_path / "cache")
    assert compiler.num_runs == 2
    monkeypatch.setattr(native_library, "FLAGS", (*native_library.FLAGS, "-g"))
    load(tmp_path / "cache")
    assert compiler.num_runs == 3


def test_processes_compile_at_once(tmp_path: Path, compiler: Compiler) -> None:
    """Each compiler waits for the other to have begun, and again for it to have written."""
    library = shared_library()._name
    meet = (
        f'touch "{tmp_path}/%s.$$"; until [ $(ls "{tmp_path}" | grep -c "^%s") = 2 ]; do :; done\n'
    )
    compiler.says(
        meet.replace("%s", "begun")
        + f'for last; do :; done; cp "{library}" "$last"\n'
        + meet.replace("%s", "written")
    )
    processes = [start(tmp_path / "cache") for _ in range(2)]
    assert [process.communicate()[0] for process in processes] == ["loaded\n"] * 2
    assert compiler.num_runs == 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeUnavailable, match=r"^no C\+\+ compiler found \(g\+\+, .*set CXX$"):
        load(tmp_path / "cache")


def test_its_state_in_words(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native_library.state(tmp_path).startswith("compiled at first use, by ")
    load(tmp_path)
    assert native_library.state(tmp_path) == "compiled"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in native_library.state(tmp_path / "other")
    assert compiler.num_runs == 1


def test_what_is_compiled_needs_no_compiler(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image may ship the library without the compiler that made it."""
    load(tmp_path / "cache")
    monkeypatch.setenv("CXX", "no-such-compiler")
    load(tmp_path / "cache")
    assert compiler.num_runs == 1


def test_a_compiler_with_options(tmp_path: Path, compiler: Compiler) -> None:
    os.environ["CXX"] += " -m64"  # put back by `compiler`
    load(tmp_path / "cache")
    assert compiler.num_runs == 1


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'In x.cpp:' >&2; echo 'x.cpp:1: error: boom' >&2; exit 1", "x.cpp:1: error: boom"),
        ("exit 3", "exit code 3 and no message"),
    ],
)
def test_a_compiler_that_fails(
    tmp_path: Path, compiler: Compiler, script: str, reason: str
) -> None:
    compiler.says(script)
    with pytest.raises(NativeUnavailable, match=rf"^.*/compiler failed: {reason}$") as raised:
        load(tmp_path / "cache")
    assert len(str(raised.value).splitlines()) == 1
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_cannot_be_loaded_is_not_kept(tmp_path: Path, compiler: Compiler) -> None:
    """A compiler may end well and write nothing, or something else."""
    for script in ("exit 0", 'for last; do :; done; echo "no library" > "$last"'):
        compiler.says(script)
        with pytest.raises(NativeUnavailable, match=r"^cannot (load|compile)"):
            load(tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []


def test_a_command_that_does_not_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(NativeUnavailable, match=r"^CXX is not a command: "):
        load(tmp_path / "cache")


def test_a_compiler_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    with pytest.raises(NativeUnavailable, match=r"^no C\+\+ compiler found \(.*/g\+\+\); install"):
        load(tmp_path / "cache")


def test_a_cache_that_cannot_be_written(tmp_path: Path, compiler: Compiler) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NativeUnavailable, match=r"^cannot compile into .*/file/cache: "):
        load(tmp_path / "file/cache")
    assert compiler.num_runs == 0


@pytest.mark.parametrize("damage", ["empty", "text", "half", "zeros", "foreign"])
def test_a_damaged_library_is_not_loaded(tmp_path: Path, compiler: Compiler, damage: str) -> None:
    """It is compiled again or refused; in any case the process lives."""
    cache = tmp_path / "cache"
    load(cache)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    half = len(whole) // 2
    contents = {
        "empty": b"",
        "text": b"not a library\n" * 100,
        "half": whole[:half],
        "zeros": whole[:half] + bytes(len(whole) - half),
        "foreign": Path(_ctypes.__file__).read_bytes(),
    }
    file.unlink()  # not in place: this process has it mapped
    file.write_bytes(contents[damage])
    process = start(cache)
    said = process.communicate()[0]
    assert process.returncode == 0
    assert said == "loaded\n" if compiler.num_runs == 2 else said.startswith("unavailable: ")


@pytest.mark.parametrize("struct", STRUCTS)
def test_another_layout_is_refused(
    tmp_path: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    struct: type[ctypes.Structure],
) -> None:
    name = struct.__name__
    larger = type(name, (struct,), {"_fields_": [("more", ctypes.c_int64)]})
    stated = tuple(larger if other is struct else other for other in STRUCTS)
    monkeypatch.setattr(native_library, "STRUCTS", stated)
    with pytest.raises(NativeUnavailable, match=rf"lays out {name} in another way$"):
        load(tmp_path / "cache")


def packed(weight: Tensor, precision: str, cuts: tuple[int, ...] = ()) -> Tensor:
    """Values of a weight fp32 [out, in] after packing, float64, read as formats.hpp lays them out.

    Rows are packed in runs that end at `cuts`.
    """
    library, format = shared_library(), FORMATS[precision]
    (out, width), num_panels = weight.shape, -(-len(weight) // LANES)
    size = library.specdec_panel_bytes(format, width)
    panels = torch.zeros(num_panels * size, dtype=torch.uint8)
    ends = [*cuts, out]
    for first, end in zip([0, *cuts], ends, strict=True):
        rows = weight[first:end].contiguous()
        library.specdec_pack(format, rows.data_ptr(), len(rows), width, first, panels.data_ptr())
    panels = panels.view(num_panels, size)
    if precision == "fp32":
        values = panels.view(torch.float32).view(num_panels, -1, LANES).transpose(1, 2).double()
    elif precision == "bf16":
        pairs = panels.view(torch.bfloat16).view(num_panels, -1, LANES, 2)
        values = pairs.transpose(1, 2).flatten(2).double()
    else:
        values = _integers(panels, precision)
    return values.flatten(0, 1)[:out, :width]


def _integers(panels: Tensor, precision: str) -> Tensor:
    """Values [num_panels, LANES, in] of records: numbers of a group, then fp16 scales."""
    bytes_of_numbers = GROUP * LANES // (1 if precision == "int8" else 2)
    num_fp16 = LANES * (1 if precision == "int8" else 2)
    records = panels.view(len(panels), -1, bytes_of_numbers + 2 * num_fp16)
    numbers = records[:, :, :bytes_of_numbers].contiguous()
    halves = records[:, :, bytes_of_numbers:].contiguous().view(torch.float16).double()
    scales = halves[:, :, :LANES, None]
    if precision == "int8":
        pairs = numbers.view(torch.int8).unflatten(2, (GROUP // 2, LANES, 2))
        values = pairs.transpose(2, 3).flatten(3).double() * scales
    else:
        words = numbers.view(torch.int32).unflatten(2, (GROUP // 8, LANES))
        shifts = torch.tensor([feature // 2 * 4 + feature % 2 * 16 for feature in range(8)])
        nibbles = (words[..., None] >> shifts) & 15  # [panel, group, word, lane, feature]
        values = nibbles.transpose(2, 3).flatten(3).double() * scales
        values = values + halves[:, :, LANES:, None]
    return torch.flatten(values.transpose(1, 2), 2)


def groups(seed: int, out: int, width: int) -> Tensor:
    """Rows of groups: normal, constant, zero, far from zero, with one spike; 1e-9 to 1e4."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = -(-width // GROUP)
    noise = torch.randn(out, num_groups, GROUP, generator=generator)
    size = 10 ** torch.empty(out, num_groups, 1).uniform_(-9, 4, generator=generator)
    spike = torch.zeros(GROUP)
    spike[7] = 3.0
    kinds = torch.stack([noise, noise[..., :1].expand_as(noise), 0 * noise, noise + 50, noise / 9])
    kinds[4] += spike
    chosen = torch.randint(0, 5, (out, num_groups), generator=generator)
    picked = kinds.gather(0, chosen[None, :, :, None].expand(1, -1, -1, GROUP))[0]
    return (picked * size).clamp(-6e4, 6e4).flatten(1)[:, :width].contiguous()


shapes = (st.integers(0, 9999), st.integers(1, 40), st.integers(1, 100))


@pytest.mark.parametrize("precision", FORMATS)
@given(*shapes, st.sets(st.integers(1, 39), max_size=3))
def test_packed_values_follow_the_rules(
    precision: str, seed: int, out: int, width: int, cuts: set[int]
) -> None:
    weight = groups(seed, out, width)
    got = packed(weight, precision, tuple(sorted(cut for cut in cuts if cut < out)))
    assert torch.equal(got, stored(weight, precision).values)


@given(*shapes)
def test_integers_err_by_half_a_step(seed: int, out: int, width: int) -> None:
    """And by what scale and least value lose as fp16: 11 bits, or steps of 2^-24."""
    weight = groups(seed, out, width)
    padded = torch.nn.functional.pad(weight, (0, -width % GROUP)).double().unflatten(1, (-1, GROUP))
    low, high = torch.aminmax(padded, dim=2, keepdim=True)

    def lost(x: Tensor) -> Tensor:
        return (x.abs() * 2.0**-11).clamp(min=2.0**-25)

    step8, step4 = torch.maximum(high, -low) / 127, (high - low) / 15
    bounds = {
        "int8": step8 / 2 + 127 * lost(step8),
        "int4": step4 / 2 + lost(low) + 15 * lost(step4),
    }
    for precision, bound in bounds.items():
        bound = bound.expand_as(padded).flatten(1)[:, :width] * (1 + 2.0**-20)  # its own rounding
        assert ((packed(weight, precision) - weight).abs() <= bound).all()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64))
def test_bf16_rounds_any_float(bits: list[int]) -> None:
    special = [0, 1, 0x7F800000, 0x7F7FFFFF, 0x007FFFFF, 0x3F808000, 0x3F818000, 0x7F800001]
    weight = torch.tensor([[*bits, *special]], dtype=torch.int32).view(torch.float32)
    got, want = packed(weight, "bf16"), weight.bfloat16().double()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan())
    assert torch.equal(packed(weight, "fp32").nan_to_num(), weight.double().nan_to_num())
