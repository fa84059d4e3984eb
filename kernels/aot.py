"""Ahead-of-time compilation: every variant of every kernel, for each target, without a GPU."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from specdec.kernels.variant import Variant

# Each has a `variants() -> Iterator[Variant]`; no two variants share a name.
MODULES = (
    "specdec.kernels.norm_rope",
    "specdec.kernels.kv_slots",
    "specdec.kernels.gumbel_argmax",
    "specdec.kernels.truncation",
    "specdec.kernels.tree_walk",
    "specdec.kernels.tree_attention",
)

MAX_THREADS = 1024  # per block, on every target


@dataclass(frozen=True)
class Target:
    """A GPU as Triton names it; `max_shared_bytes` is what one block may have of shared memory.

    Sources: CUDA C++ Programming Guide, technical specifications per compute capability ("maximum
    amount of shared memory per thread block"); AMD CDNA 3 ISA, local data share of a work-group.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    max_shared_bytes: int


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 * 1024),
        Target("sm_90", "cuda", 90, 32, 227 * 1024),
        Target("sm_100", "cuda", 100, 32, 227 * 1024),
        Target("sm_120", "cuda", 120, 32, 99 * 1024),
        Target("gfx942", "hip", "gfx942", 64, 64 * 1024),
    )
}


@dataclass(frozen=True)
class CompiledVariant:
    """What compiling one variant for one target gave; None where it did not get that far.

    `registers` is per thread, on AMD vector registers. `spill_bytes` is memory per thread for what
    found no register: the stack frame, which also holds arrays indexed at run time. `shared_bytes`
    is per block. `seconds` is near zero when Triton's cache had the kernel. `error` is one line.
    """

    name: str
    target: str
    is_hot: bool
    registers: int | None = None
    shared_bytes: int | None = None
    spill_bytes: int | None = None
    seconds: float = 0.0
    error: str | None = None

    @property
    def problem(self) -> str | None:
        """Why this variant must not ship, in one line, or None."""
        if self.error is None and self.is_hot and self.spill_bytes:
            return f"hot, but spills {self.spill_bytes} bytes per thread"
        return self.error


@dataclass(frozen=True)
class Job:
    """One variant to compile for one target, by name: kernels themselves cannot be sent."""

    module: str
    name: str
    target: str
    is_hot: bool


def jobs(modules: Sequence[str], targets: Sequence[str]) -> list[Job]:
    """Every variant of `modules` for those of `targets` where it is used, module by module.

    Raises ImportError for a module that is not there, ValueError for a name given twice or a
    variant for an unknown target.
    """
    found: dict[str, list[Job]] = {}
    for module in modules:
        for variant in _variants(module).values():
            if variant.name in found:
                raise ValueError(f"variants of two modules are named {variant.name!r}")
            if unknown := set(variant.targets) - set(TARGETS):
                raise ValueError(f"variant {variant.name!r} is for unknown targets {unknown}")
            found[variant.name] = [
                Job(module, variant.name, target, variant.is_hot)
                for target in targets
                if target in (variant.targets or TARGETS)
            ]
    return [job for group in found.values() for job in group]


@lru_cache
def _variants(module: str) -> dict[str, Variant]:
    named: dict[str, Variant] = {}
    for variant in importlib.import_module(module).variants():
        if variant.name in named:
            raise ValueError(f"two variants of {module} are named {variant.name!r}")
        named[variant.name] = variant
    return named


def compile_jobs(jobs: Sequence[Job]) -> Iterator[CompiledVariant]:
    """Compile in as many processes as there are cores; results come as they are ready.

    A compiler that dies (LLVM aborts on what it did not foresee) breaks the pool. What was not
    done by then is compiled one by one, so that each death has a name.
    """
    pending = list(jobs)
    num_workers = len(os.sched_getaffinity(0))
    while pending:
        # forked children would inherit torch's threads, and a Triton that may be interpreting
        pool = ProcessPoolExecutor(
            min(num_workers, len(pending)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare_worker,
        )
        is_drained = False
        try:
            futures = {pool.submit(_compile_job, job): job for job in pending}
            for future in as_completed(futures):
                try:
                    compiled = future.result()
                except BrokenProcessPool:
                    continue
                pending.remove(futures[future])
                yield compiled
            is_drained = True
        finally:
            # A drained pool is waited for: at exit, Python would write to pipes that it is closing.
            pool.shutdown(wait=is_drained, cancel_futures=True)
        if pending and num_workers == 1:
            job = pending.pop(0)
            yield CompiledVariant(job.name, job.target, job.is_hot, error="the compiler died")
        num_workers = 1


def _prepare_worker() -> None:
    """Runs in a new worker, which has not imported Triton yet."""
    os.environ.pop("TRITON_INTERPRET", None)  # a kernel defined under it cannot be compiled
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt ends workers without a traceback


def _compile_job(job: Job) -> CompiledVariant:
    return compile_variant(_variants(job.module)[job.name], TARGETS[job.target])


def compile_variant(variant: Variant, target: Target) -> CompiledVariant:
    """Compile in this process, and say what it takes on the GPU and what went wrong.

    Whatever the compiler raises is the result's `error`. So is a block that no GPU of the target
    can hold; then all numbers are known.
    """
    usage, error = None, None
    started = time.perf_counter()
    with _captured_output() as read_output, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about defaults of Triton's next release
        try:
            usage = _compile(variant, target)
        except Exception as problem:
            error = _one_line(problem, read_output())
    seconds = round(time.perf_counter() - started, 3)
    compiled = CompiledVariant(
        variant.name, target.name, variant.is_hot, seconds=seconds, error=error
    )
    if usage is None:
        return compiled
    return replace(
        compiled,
        registers=usage.registers,
        shared_bytes=usage.shared_bytes,
        spill_bytes=usage.spill_bytes,
        error=_misfit(usage, target),
    )


@dataclass(frozen=True)
class _Usage:
    """What a kernel takes on the GPU: per thread, and for a block of `num_threads`."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_threads: int


def _misfit(usage: _Usage, target: Target) -> str | None:
    for need, most, unit in (
        (usage.shared_bytes, target.max_shared_bytes, "bytes of shared memory"),
        (usage.num_threads, MAX_THREADS, "threads"),
    ):
        if need > most:
            return f"does not fit: needs {need} {unit}, a block of {target.name} has {most}"
    return None


def _compile(variant: Variant, target: Target) -> _Usage:
    """Raises whatever the compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(variant.kernel, triton.JITFunction):
        raise TypeError("the kernel was defined under TRITON_INTERPRET, or is none")
    names: list[str] = variant.kernel.arg_names
    aligned = [name for name, kind in variant.signature.items() if kind.startswith("*")]
    aligned += variant.multiples_of_16
    if {*variant.signature, *variant.constants} != set(names) or not set(aligned) <= set(names):
        raise ValueError(f"the variant's arguments are not the kernel's: {', '.join(names)}")
    source = ASTSource(
        variant.kernel,
        {name: variant.signature.get(name, "constexpr") for name in names},
        dict(variant.constants),
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    options = {**variant.options, **(variant.amd_options if target.backend == "hip" else {})}
    compiled = triton.compile(source, target=gpu, options=options)
    per_thread = _nvidia_usage(compiled) if target.backend == "cuda" else _amd_usage(compiled)
    num_threads = compiled.metadata.num_warps * target.warp_size
    return _Usage(*per_thread, compiled.metadata.shared, num_threads)


def _nvidia_usage(compiled: Any) -> tuple[int, int]:
    """Registers and stack bytes as the cubin states them: `REG:26 STACK:0 SHARED:0 LOCAL:0 ...`."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    read = _reader(text, r"\b{}:(\d+)")
    return read("REG"), read("STACK") + read("LOCAL")


def _amd_usage(compiled: Any) -> tuple[int, int]:
    """Registers and stack bytes from the assembly's metadata: `.vgpr_count:     12`.

    Vector registers spilled to accumulation registers count as well. Spilled scalar registers do
    not: they go to lanes of vector registers, and to memory only through those.
    """
    read = _reader(compiled.asm["amdgcn"], r"\.{}:\s+(\d+)")
    spilled = 4 * read("vgpr_spill_count")
    return read("vgpr_count"), max(read("private_segment_fixed_size"), spilled)


def _reader(text: str, pattern: str) -> Callable[[str], int]:
    """A function from a key to its number in `text`; `pattern` has {} for the key."""

    def read(key: str) -> int:
        match = re.search(pattern.format(key), text)
        if match is None:
            raise ValueError(f"cannot find {key} in what the compiler says of the kernel")
        return int(match[1])

    return read


@contextmanager
def _captured_output() -> Iterator[Callable[[], str]]:
    """Catch what the compiler prints, its C++ parts too; yields what returns it so far."""
    with tempfile.TemporaryFile("w+", errors="replace") as file:

        def read() -> str:
            file.flush()
            file.seek(0)
            return file.read()

        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with redirect_stdout(file), redirect_stderr(file):
                yield read
        finally:
            os.dup2(before, 2)
            os.close(before)


def _one_line(error: BaseException, printed: str) -> str:
    """The reason, and the kernel's line if the error names one.

    Triton's errors quote the whole kernel; one inside a helper is chained to the caller's. Passes
    and assemblers raise only that they failed, and print the reason.
    """
    while error.__cause__ is not None and hasattr(error.__cause__, "node"):
        error = error.__cause__
    reason = str(getattr(error, "error_message", None) or error)
    lines = [line.strip() for line in (printed + "\n" + reason).splitlines() if line.strip()]
    marked = [line for line in lines if re.search(r"\b(error|fatal)\b\s*:", line, re.IGNORECASE)]
    line = (marked or [*reason.split("\n"), ""])[0].strip() or type(error).__name__
    node, source = getattr(error, "node", None), getattr(error, "src", None)
    if node is None or not source:
        return line
    return f"{line} in `{source.splitlines()[node.lineno - 1].strip()}`"
