"""NativeLibrary: the C++ forward in kernels/native, compiled for this processor at first use."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import c_double, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

from specdec.kernels.native_structs import (
    STRUCTS,
    CAcceptance,
    CCache,
    CChoice,
    CDraw,
    CLinear,
    CModel,
    CStep,
)

SOURCES = Path(__file__).with_name("native")
# -ffp-contract=off: a product and a sum are fused where the source says so, and nowhere else, so
# that all forms of a kernel round alike (docs/adr/0003).
FLAGS = ("-O3", "-std=c++20", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
COMPILERS = ("g++", "clang++", "c++")


LANES = 16  # output features of a panel: formats.hpp
GROUP = 32  # input features are padded to a multiple of it


class NativeUnavailable(Exception):
    """The library cannot be compiled or loaded here; the text says why."""


def load(cache: Path, on_compile: Callable[[], None] = lambda: None) -> ctypes.CDLL:
    """The library, compiled into the folder `cache` unless it is there.

    Compiling takes several seconds; `on_compile` is called before. Raises NativeUnavailable.
    Example: `load(Path("~/.cache/specdec/native").expanduser())`.
    """
    file = cache / f"specdec-{_digest()}.so"
    if not _is_whole(file):
        compiler = _compiler()
        on_compile()
        _compile(compiler, file)
    library = _open(file)
    library.specdec_open.argtypes = [ctypes.POINTER(CModel), c_int32]
    library.specdec_open.restype = c_void_p
    library.specdec_close.argtypes = [c_void_p]
    library.specdec_close.restype = None
    library.specdec_forward.argtypes = [c_void_p, ctypes.POINTER(CCache), ctypes.POINTER(CStep)]
    library.specdec_forward.restype = None
    library.specdec_multiply.argtypes = [
        c_void_p,
        ctypes.POINTER(CLinear),
        c_void_p,
        c_int32,
        c_void_p,
    ]
    library.specdec_multiply.restype = None
    library.specdec_move.argtypes = [
        c_void_p,
        ctypes.POINTER(CCache),
        ctypes.POINTER(c_int32),
        ctypes.POINTER(c_int32),
        c_int32,
    ]
    library.specdec_move.restype = None
    library.specdec_gumbel_all.argtypes = [c_uint64, c_int32, c_int64, c_void_p]
    library.specdec_gumbel_all.restype = None
    library.specdec_gumbel_of.argtypes = [c_uint64, c_void_p, c_void_p, c_int64, c_void_p]
    library.specdec_gumbel_of.restype = None
    library.specdec_sample.argtypes = [c_void_p, c_int32, ctypes.POINTER(CDraw)]
    library.specdec_sample.restype = c_int32
    library.specdec_walk.argtypes = [
        c_void_p,
        c_int64,
        c_int32,
        c_void_p,
        c_int32,
        ctypes.POINTER(CDraw),
        c_void_p,
    ]
    library.specdec_walk.restype = c_int32
    library.specdec_are_finite.argtypes = [c_void_p, c_int32, c_int64, c_int32, c_void_p]
    library.specdec_are_finite.restype = None
    library.specdec_choose.argtypes = [ctypes.POINTER(CAcceptance), ctypes.POINTER(CChoice)]
    library.specdec_choose.restype = None
    library.specdec_learn.argtypes = [
        ctypes.POINTER(CAcceptance),
        ctypes.POINTER(CChoice),
        ctypes.POINTER(c_int32),
    ]
    library.specdec_learn.restype = None
    library.specdec_has_wide_registers.argtypes = []
    library.specdec_has_wide_registers.restype = c_int32
    library.specdec_read.argtypes = [c_void_p, c_int64, c_int32]
    library.specdec_read.restype = c_double
    library.specdec_panel_bytes.argtypes = [c_int32, c_int32]
    library.specdec_panel_bytes.restype = c_int64
    for pack in (library.specdec_pack, library.specdec_pack_gguf):
        pack.argtypes = [c_int32, c_void_p, c_int32, c_int32, c_int32, c_void_p]
        pack.restype = None
    return library


def compiled(cache: Path) -> ctypes.CDLL | None:
    """The library if a `load` from this folder needs not compile it, else None."""
    try:
        return load(cache) if _is_whole(cache / f"specdec-{_digest()}.so") else None
    except NativeUnavailable:
        return None


def state(cache: Path) -> str:
    """What a `load` from this folder would find, in words; compiles nothing."""
    if _is_whole(cache / f"specdec-{_digest()}.so"):
        return "compiled"
    try:
        return f"compiled at first use, by {_compiler()[0]}"
    except NativeUnavailable as reason:
        return str(reason)


def _open(file: Path) -> ctypes.CDLL:
    """Load a library and check that it states the structures as this file does."""
    try:
        library = ctypes.CDLL(str(file))
        library.specdec_struct_bytes.argtypes = [c_int32]
        library.specdec_struct_bytes.restype = c_int32
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"cannot load {file}: {error}") from error
    for number, struct in enumerate(STRUCTS):
        if library.specdec_struct_bytes(number) != ctypes.sizeof(struct):
            raise NativeUnavailable(f"{file} lays out {struct.__name__} in another way")
    return library


def _compiler() -> list[str]:
    """The command that compiles C++: $CXX or the first of COMPILERS."""
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise NativeUnavailable(f"CXX is not a command: {error}") from None
    command = given or [next(filter(shutil.which, COMPILERS), "")]
    if not shutil.which(command[0]):
        wanted = command[0] or ", ".join(COMPILERS)
        raise NativeUnavailable(f"no C++ compiler found ({wanted}); install one or set CXX")
    return command


def _digest() -> str:
    """A name for the sources and for the processor that -march=native means."""
    digest = hashlib.sha256(" ".join((*FLAGS, platform.machine())).encode())
    for source in sorted(SOURCES.glob("*.?pp")):
        digest.update(source.read_bytes())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [f"flags {platform.processor()}"]
    for start in ("model name", "flags", "CPU part", "Features"):  # x86 and ARM
        digest.update(next((line for line in lines if line.startswith(start)), "").encode())
    return digest.hexdigest()[:16]


def _is_whole(file: Path) -> bool:
    """Whether a library is there as `_compile` left it: loading half a one kills the process."""
    try:
        contents = file.read_bytes()
    except OSError:
        return False
    return contents[-32:] == hashlib.sha256(contents[:-32]).digest()


def _compile(compiler: list[str], file: Path) -> None:
    """Compile beside `file` and move into place: processes may do so at once."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            output = Path(folder) / file.name
            command = [*compiler, *FLAGS, str(SOURCES / "forward.cpp"), "-o", str(output)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                silence = f"exit code {result.returncode} and no message"
                first = next((x for x in result.stderr.splitlines() if "error" in x), silence)
                raise NativeUnavailable(f"{compiler[0]} failed: {first}")
            _open(output)  # what cannot be loaded is not kept
            with output.open("ab") as library:  # what follows the sections is not loaded
                library.write(hashlib.sha256(output.read_bytes()).digest())
            os.replace(output, file)
    except OSError as error:
        raise NativeUnavailable(f"cannot compile into {file.parent}: {error}") from error
